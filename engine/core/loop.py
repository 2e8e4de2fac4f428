"""The engine's heartbeat: commands in, one step, events out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from engine.core import messages
from engine.runner.base import Adapters, PendingStep, Runner, RunnerBroken
from engine.scheduler import Scheduler
from engine.types import MemoryUse, Request, RequestFailure, SchedulerOutput, StepResult
from engine.types.step import UNKNOWN_WORK, ModelWork, step_work
from observability.emit.names import Cause

_log = logging.getLogger(__name__)

# Load is reported at least this often, in seconds.
_IDLE_REPORT_S = 1.0
# Pause before looking again when there is work that no plan can take up yet, in seconds.
_STALLED_S = 0.01
# Pause before looking again whether a grammar is made, in seconds.
_GRAMMAR_S = 0.001
# How long the runner may keep what it has of requests that have ended while there is no other to plan for, in
# seconds. The plan of a request that comes before that forgets them on the way.
_RELEASE_S = 0.02
# Memory use is measured and reported this often, in seconds.
_MEMORY_REPORT_S = 5.0


class AdapterDesk:
    """The core's part in adding, loading and removing adapters. Lives in the loop's thread; what takes time
    is done in the runner's own.
    """

    def __init__(
        self, scheduler: Scheduler, adapters: Adapters, send: Callable[[messages.Report], None]
    ) -> None:
        self._scheduler = scheduler
        self._adapters = adapters
        self._send = send
        self._num_adding = 0
        # Nobody asks for them any more; those that have asked are served.
        self._leaving: set[str] = set()
        self._loaded: tuple[str, ...] = ()

    @property
    def is_busy(self) -> bool:
        """Whether something is on its way that somebody waits for."""
        return bool(self._num_adding) or self._scheduler.is_loading

    def take(self, command: messages.AddAdapter | messages.DropAdapter) -> None:
        """Begins what the front asks for."""
        if isinstance(command, messages.AddAdapter):
            self._num_adding += 1
            # Others may still run with the same files from before.
            self._leaving.discard(command.name)
            self._adapters.add_later(command.token, command.name, command.folder)
        else:
            self._leaving.add(command.name)

    def publish(self) -> None:
        """Says what was added, and what is in memory when that has changed."""
        if self._num_adding:
            for token, problem in self._adapters.answers():
                self._num_adding -= 1
                self._send(messages.AdapterAdded(token, problem))
        if self._leaving:
            for name in self._leaving - self._scheduler.adapters_asked_for():
                self._adapters.drop(name)
                self._leaving.discard(name)
        loaded = self._scheduler.loaded_adapters
        if loaded != self._loaded:
            self._loaded = loaded
            self._send(messages.AdaptersLoaded(loaded))


class CommandMailbox(Protocol):
    """Where commands come from and reports go."""

    def receive(self, timeout_s: float) -> list[messages.Command]:
        """Commands that have arrived, waiting up to `timeout_s` for the first."""
        ...

    def send(self, message: messages.Report) -> None:
        """Passes a report on."""
        ...


class _Launched:
    """A step on its way, or one whose launch already failed."""

    def __init__(self, plan: SchedulerOutput, clock: Callable[[], float]) -> None:
        self.plan = plan
        self._clock = clock
        self._launched_s = clock()
        self._pending: PendingStep | None = None
        self._cause = ""

    def launch(self, runner: Runner) -> None:
        try:
            self._pending = runner.launch(self.plan)
        except RunnerBroken:
            raise
        except Exception as error:
            _log.exception("launch of step %d failed", self.plan.step_id)
            self._cause = f"{type(error).__name__}: {error}"

    def wait(self) -> StepResult:
        if self._pending is None:
            return self._failed(self._cause)
        try:
            result = self._pending.wait()
        except RunnerBroken:
            raise
        except Exception as error:
            _log.exception("step %d failed", self.plan.step_id)
            return self._failed(f"{type(error).__name__}: {error}")
        return self._failed(result.failure) if result.failure else result

    def _failed(self, cause: str) -> StepResult:
        # The time since the launch, because a failed step reports none; it may include planning of the next
        # one.
        seconds = self._clock() - self._launched_s
        return StepResult(self.plan.step_id, (), compute_s=seconds, failure=cause)


class EngineLoop:
    """Drives scheduler and runner. With `overlap`, step n + 1 is planned and launched while step n runs; the
    tokens are the same, because a plan never depends on which token was sampled, only on how many.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        mailbox: CommandMailbox,
        *,
        overlap: bool = False,
        clock: Callable[[], float] = time.monotonic,
        memory_use: Callable[[int], MemoryUse] | None = None,
        work: ModelWork = UNKNOWN_WORK,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._mailbox = mailbox
        self._overlap = overlap
        self._clock = clock
        # Takes the number of blocks that were ever written.
        self._memory_use = memory_use
        self._memory_due_s = 0.0
        self._work = work
        self._launched: _Launched | None = None
        # Requests whose grammars are being made, by id.
        self._early: dict[int, Request] = {}
        self._checks: list[int] = []
        self._adapters = AdapterDesk(scheduler, runner.adapters, mailbox.send)
        self._totals: list[messages.StepTotals] = []
        self._num_failed_steps = 0
        self._last_step_id = 0
        self._stalled = False
        self.stopped = False
        self.broken = False

    def run(self) -> None:
        """Steps until a command stops it, or until the runner breaks."""
        while not self.stopped:
            self.step()

    def step(self) -> None:
        """One turn: take commands, plan, launch, take a result in, publish."""
        patience_s = self._patience_s()
        hurries = self._early or self._adapters.is_busy
        self._apply_commands(min(patience_s, _GRAMMAR_S) if hurries else patience_s)
        if self.stopped:
            return
        self._submit_ready()
        try:
            plan = self._scheduler.schedule(self._clock())
            previous, self._launched = self._launched, self._launch(plan)
            self._stalled = previous is None and self._launched is None
            if previous is not None:
                self._collect(previous)
            if self._launched is not None and not self._may_overlap():
                self._collect(self._launched)
                self._launched = None
        except RunnerBroken as error:
            self._give_up(str(error))
        self.publish()
        self._adapters.publish()
        self._answer_checks()

    def _patience_s(self) -> float:
        if self._launched is not None or self._checks:
            return 0.0
        if self._scheduler.has_work:
            if not self._scheduler.num_requests:
                return _RELEASE_S
            return _STALLED_S if self._stalled else 0.0
        deadline = self._scheduler.next_deadline_s()
        if deadline is None:
            return _IDLE_REPORT_S
        return min(_IDLE_REPORT_S, max(0.0, deadline - self._clock()))

    def _may_overlap(self) -> bool:
        return self._overlap and not self._scheduler.isolating and not self._checks

    def _apply_commands(self, timeout_s: float) -> None:
        for command in self._mailbox.receive(timeout_s):
            now = self._clock()
            match command:
                case messages.Submit(request):
                    if self._may_start(request):
                        self._scheduler.submit(request, now)
                    else:
                        self._early[request.request_id] = request
                case messages.Cancel(request_id, reason):
                    self._submit_early(request_id, now)
                    self._scheduler.cancel(request_id, now, reason)
                case messages.Fail(request_id, failure):
                    self._submit_early(request_id, now)
                    self._scheduler.fail_request(request_id, failure)
                case messages.Release(ticket):
                    self._scheduler.release(ticket)
                case messages.AddAdapter() | messages.DropAdapter():
                    self._adapters.take(command)
                case messages.Check(token):
                    self._checks.append(token)
                case messages.Stop():
                    self.stopped = True
                case messages.Start():
                    raise AssertionError("started twice")

    def _may_start(self, request: Request) -> bool:
        return request.grammar is None or self._runner.is_ready(request.grammar, request.tenant)

    def _submit_ready(self) -> None:
        for request in list(self._early.values()):
            if self._may_start(request):
                self._submit_early(request.request_id, self._clock())

    def _submit_early(self, request_id: int, now: float) -> None:
        """Submits a request that waits for its grammar, if it does."""
        request = self._early.pop(request_id, None)
        if request is not None:
            self._scheduler.submit(request, now, waited_for=Cause.GRAMMAR_COMPILE.value)

    def _launch(self, plan: SchedulerOutput) -> _Launched | None:
        if not plan.scheduled and not plan.released:
            return None
        self._last_step_id = plan.step_id
        launched = _Launched(plan, self._clock)
        launched.launch(self._runner)
        return launched

    def _collect(self, launched: _Launched) -> None:
        result = launched.wait()
        if launched.plan.scheduled:
            self._totals.append(_totals(launched.plan, result, self._work))
        if not result.failure:
            self._scheduler.update(result, self._clock())
            return
        self._num_failed_steps += 1
        _log.warning("step %d failed: %s", result.step_id, result.failure)
        now, seconds = self._clock(), result.compute_s
        if not self._scheduler.fail(result.step_id, result.failure, now, seconds=seconds):
            raise RunnerBroken(result.failure)

    def _give_up(self, cause: str) -> None:
        _log.error("the runner is broken: %s", cause)
        self._launched = None
        for request_id in list(self._early):
            self._submit_early(request_id, self._clock())
        self._scheduler.fail_all(
            RequestFailure(
                reason="STEP_FAILED",
                message=f"the engine's step failed ({cause}) and the engine cannot go on; retry: another "
                "engine, or this one after its restart, will take the request",
                metadata={"cause": cause},
                retry_after_s=5.0,
            )
        )
        self.publish()
        self._mailbox.send(messages.Broken(cause))
        self.broken = True
        self.stopped = True

    def publish(self) -> None:
        """Reports events and load, and now and then memory and how experts are used."""
        now, memory, experts = self._clock(), None, None
        if self._memory_use is not None and now >= self._memory_due_s:
            self._memory_due_s = now + _MEMORY_REPORT_S
            memory = self._memory_use(self._scheduler.num_touched_blocks)
            experts = self._runner.expert_spread()
        self._mailbox.send(
            messages.StepDone(
                self._last_step_id,
                self._scheduler.drain_events(),
                self._scheduler.drain_kv_events(),
                self._scheduler.load(now),
                tuple(self._totals),
                memory,
                self._num_failed_steps,
                experts,
            )
        )
        self._totals.clear()
        self._num_failed_steps = 0

    def _answer_checks(self) -> None:
        if self._launched is not None or not self._checks or self.stopped:
            return
        violation = ""
        try:
            self._scheduler.check_invariants()
        except AssertionError as error:
            violation = str(error) or "an invariant without a name"
        for token in self._checks:
            self._mailbox.send(
                messages.Checked(
                    token=token,
                    violation=violation,
                    num_unreferenced_blocks=self._scheduler.num_unreferenced_blocks,
                    num_total_blocks=self._scheduler.num_total_blocks,
                    num_requests=self._scheduler.num_requests + len(self._early),
                    num_runner_states=self._runner.num_states(),
                )
            )
        self._checks.clear()


def _totals(plan: SchedulerOutput, result: StepResult, work: ModelWork) -> messages.StepTotals:
    num_tokens = num_decodes = 0
    for each in plan.scheduled:
        num_tokens += each.num_tokens
        num_decodes += each.samples and each.num_tokens == 1 + len(each.draft_token_ids)
    num_sequences = len(plan.scheduled)
    kind = "failed" if result.failure else "mixed"
    if not result.failure and num_decodes in {0, num_sequences}:
        kind = "decode" if num_decodes else "prefill"
    flop, read_bytes = step_work(plan, work)
    return messages.StepTotals(
        kind=kind,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        seconds=result.compute_s,
        num_halvings=result.num_halvings,
        saved_s=result.saved_s,
        spent_s=result.spent_s,
        flop=flop,
        read_bytes=read_bytes,
    )
