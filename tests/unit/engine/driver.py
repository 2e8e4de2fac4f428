"""Drives a scheduler with the checked runner, step by step, and checks everything after every operation."""

from __future__ import annotations

import math
from collections import deque

import msgspec
import pytest

from engine.config import CacheConfig, SchedulerConfig
from engine.kv import PrefixTiers
from engine.scheduler import Scheduler
from engine.types import EngineTime, FinishReason, MemoryPlan, Request, SamplingParams, StepResult, TokenEvent
from tests.unit.engine.checked_runner import CheckedRunner, expected_token
from tests.unit.engine.pretend_disk import PretendDisk, PretendPeers


def memory_plan(
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 128,
    *,
    num_states: int = 0,
    state_interval: int = 8,
    window: int = 0,
    num_window_blocks: int = 0,
    moves: bool = False,
    num_forgotten_blocks: int = 1024,
) -> MemoryPlan:
    """A plan in which only the counts matter. `moves`: memory goes from blocks to window blocks, which take
    half as much more, and back.
    """
    each = (2, 3) if moves else (1, 0)
    total = block_size * (num_blocks * each[0] + num_window_blocks * each[1])
    return MemoryPlan(
        total_bytes=num_blocks * block_size,
        weights_bytes=0,
        workspace_bytes=0,
        headroom_bytes=0,
        kv_cache_bytes=total,
        kv_bytes_per_token=sum(each),
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        num_states=num_states,
        state_interval=state_interval if num_states else 0,
        window=window,
        num_window_blocks=num_window_blocks,
        window_bytes_per_token=each[1],
        num_block_ids=num_blocks + num_window_blocks if moves else 0,
        num_window_block_ids=num_window_blocks + num_blocks // 2 if moves else 0,
        forgotten_bytes=num_forgotten_blocks,
        forgotten_block_bytes=1,
    )


class Driver:
    """Scheduler and runner with a clock that only `step` and `wait` move."""

    def __init__(
        self,
        *,
        memory: MemoryPlan | None = None,
        overlap: bool = False,
        prefix_caching: bool = True,
        num_host_blocks: int = 0,
        window: int | None = None,
        whole_prompts: bool = False,
        attention_balance: float = math.inf,
        host_bytes_per_s: float = 8e9,
        disk: PretendDisk | None = None,
        peers: PretendPeers | None = None,
        check: bool = True,
        step_s: float = 0.01,
        **config: object,
    ) -> None:
        memory = memory or memory_plan()
        options: dict[str, object] = {
            "max_num_batched_tokens": 32,
            "max_num_seqs": 8,
            "long_prefill_tokens": 16,
        }
        self.config = SchedulerConfig(**{**options, **config})  # type: ignore[arg-type]
        self.scheduler = Scheduler(
            self.config,
            CacheConfig(prefix_caching=prefix_caching, host_bytes_per_s=host_bytes_per_s),
            memory,
            model="m",
            num_host_blocks=num_host_blocks,
            window=window,
            attention_balance=attention_balance,
            whole_prompts=whole_prompts,
            tiers=PrefixTiers(disk=disk, peers=peers),
        )
        self.runner = CheckedRunner(
            memory.num_block_ids or memory.num_blocks,
            memory.block_size,
            num_host_blocks,
            max_tokens_per_step=self.config.max_num_batched_tokens,
            window=window,
            num_window_blocks=memory.num_window_block_ids or memory.num_window_blocks,
            partial_window=memory.window,
        )
        # One of both at a time.
        self.disk = disk = disk or peers
        if disk is not None:
            disk.runner = self.runner
        self.memory = memory
        self.overlap = overlap
        self.check = check
        self.step_s = step_s
        # Part of what is asked of the disk that it does in a step.
        self.disk_share = 0.5
        self.now = 0.0
        self.broken = False
        self.requests: dict[int, Request] = {}
        self.events: dict[int, list[TokenEvent]] = {}
        # Tokens computed so far of answers that are told at the end.
        self.withheld: dict[int, int] = {}
        self.plans: list = []
        # What steps with rows took, failed ones included.
        self.busy_s = 0.0
        self._pending: deque = deque()
        self._next_id = 1

    def submit(
        self, prompt: list[int] | tuple[int, ...], *, max_tokens: int = 4, n: int = 1, **fields: object
    ) -> int:
        """Submits a request; keyword arguments go to SamplingParams where it has them, else to Request."""
        sampling_names = SamplingParams.__struct_fields__
        sampling = {key: fields.pop(key) for key in list(fields) if key in sampling_names}
        sampling.setdefault("best_of", n)
        request = Request(
            request_id=self._next_id,
            external_id=f"r{self._next_id}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, n=n, **sampling),  # type: ignore[arg-type]
            **{"arrival_s": self.now, **fields},  # type: ignore[arg-type]
        )
        self._next_id += 1
        self.requests[request.request_id] = request
        self.events[request.request_id] = []
        self.scheduler.submit(request, self.now)
        self._after()
        return request.request_id

    def cancel(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self.scheduler.cancel(request_id, self.now, reason)
        self._after()

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def step(self) -> None:
        """One turn of the core loop, overlapped or not."""
        plan = self.scheduler.schedule(self.now)
        self._after()
        launched = bool(plan.scheduled or plan.released)
        if launched:
            self.plans.append(plan)
            self._pending.append((plan, self.runner.launch(plan)))
        if self.disk is not None:
            self.disk.work(self.disk_share)
        self.now += self.step_s
        keep = 1 if self.overlap and launched and not self.scheduler.isolating else 0
        while len(self._pending) > keep:
            plan, pending = self._pending.popleft()
            result = pending.wait()
            if result.failure:
                result = msgspec.structs.replace(result, compute_s=self.runner.compute_s)
            self.busy_s += result.compute_s if plan.scheduled else 0.0
            self._collect(result)

    def _collect(self, result: StepResult) -> None:
        if not result.failure:
            self.scheduler.update(result, self.now)
        elif not self.scheduler.fail(result.step_id, result.failure, self.now, seconds=result.compute_s):
            self.broken = True
        self._after()

    def run(self, max_steps: int = 3000) -> None:
        """Steps until nothing is left to do."""
        for _ in range(max_steps):
            self.step()
            if self._pending or self.scheduler.has_work:
                continue
            if self.disk is None or self.disk.is_idle:
                return
        raise AssertionError(f"{self.scheduler.num_requests} requests did not end in {max_steps} steps")

    def _after(self) -> None:
        for event in self.scheduler.drain_events():
            if event.withheld_tokens:
                self.withheld[event.request_id] = event.withheld_tokens
            else:
                self.events[event.request_id].append(event)
        if self.check:
            self.scheduler.check_invariants()

    # What came out.

    def tokens(self, request_id: int, choice: int = 0) -> list[int]:
        return [
            token
            for event in self.events[request_id]
            if event.choice_index == choice
            for token in event.token_ids
        ]

    def finish(self, request_id: int, choice: int = 0) -> FinishReason | None:
        for event in self.events[request_id]:
            if event.finish_reason is not None and (event.choice_index == choice or event.failure):
                return event.finish_reason
        return None

    def failure(self, request_id: int) -> str:
        return next((e.failure.reason for e in self.events[request_id] if e.failure), "")

    def first_token_s(self, request_id: int) -> float:
        event = next(event for event in self.events[request_id] if event.first_token)
        assert event.first_token
        return event.first_token.first_token_s - self.requests[request_id].arrival_s

    def engine_time(self, *request_ids: int) -> EngineTime:
        """What ends have told of these requests, or of all."""
        told = EngineTime()
        for request_id in request_ids or self.events:
            for event in self.events[request_id]:
                if event.statistics is not None:
                    told += event.statistics.engine_time
        return told

    def expected(self, request_id: int, choice: int = 0) -> list[int]:
        """What the choice yields when nothing stops it but max_tokens, continuation left out."""
        request = self.requests[request_id]
        given = len(request.output_token_ids)
        end = given + 1 if request.hand_over else request.sampling.max_tokens
        return [
            expected_token(request.prompt_token_ids, request.sampling.seed, choice, position)
            for position in range(given, end)
        ]

    def check_costs(self) -> None:
        """What requests were told to have taken is what steps took, but for what the next step bears."""
        owed_s = self.scheduler._results.costs._owed_s
        assert self.engine_time().total_s + owed_s == pytest.approx(self.busy_s)

    def check_everything(self) -> None:
        """After the end: exactly one terminal event each, right tokens, and nothing left behind."""
        for request_id, request in self.requests.items():
            events = self.events[request_id]
            failures = [event for event in events if event.failure]
            assert len(failures) <= 1
            terminal = [event for event in events if event.finish_reason is not None]
            if failures:
                assert terminal[-1].failure, "nothing may follow a failure"
                assert events[-1].failure
            else:
                assert sorted(event.choice_index for event in terminal) == list(range(request.sampling.n))
            for choice in range(request.sampling.n):
                got = self.tokens(request_id, choice)
                expected = self.expected(request_id, choice)
                assert got == expected[: len(got)], f"request {request_id} choice {choice}"
                if self.finish(request_id, choice) is FinishReason.LENGTH:
                    kv, limit = request.retention, self.memory.max_model_len - len(request.prompt_token_ids)
                    if kv is not None and kv.outlives_positions:
                        limit = len(request.output_token_ids) + len(expected)
                    assert len(got) == min(len(expected), limit - len(request.output_token_ids))
            assert sum(event.first_token is not None for event in events) <= 1
        self.check_costs()
        assert self.scheduler.num_requests == 0
        assert self.scheduler.num_unreferenced_blocks == self.scheduler.num_total_blocks
        assert self.runner.num_states() == 0
