"""The scheduler as the core loop sees it: submit and cancel, schedule a step, take its result in."""

from __future__ import annotations

import heapq
import math

import msgspec

from contract.prefix import PrefixHasher
from engine.config import CacheConfig, SchedulerConfig
from engine.kv import NO_TIERS, Division, KvCache, PrefixTiers
from engine.policy.door import Door, kept_of, refuse_impossible, tokens_limit
from engine.policy.forecast import Batch
from engine.policy.isolation import FailureIsolation
from engine.policy.rates import StepRate
from engine.scheduler.adapters import AdapterSlots
from engine.scheduler.beams import BeamSearch
from engine.scheduler.needs import AdapterNeed, ForgottenRoom, PrefixNeed
from engine.scheduler.plain_steps import PlainSteps
from engine.scheduler.planner import Planner
from engine.scheduler.results import ResultHandler, poisoned
from engine.scheduler.sequence import Need, RequestGroup, Sequence, Status
from engine.scheduler.state import SchedulerState
from engine.types import (
    NOT_MEASURED,
    ChoiceHistory,
    FinishReason,
    KeptBlocks,
    KvEvent,
    MeasuredSpeed,
    MemoryPlan,
    Request,
    RequestFailure,
    SamplingParams,
    SchedulerLoad,
    SchedulerOutput,
    StepResult,
    TokenEvent,
)

# Runs alone to find out if the runner works, when a request has failed alone. Nobody waits for its answer.
_PROBE = Request(
    request_id=-1,
    external_id="probe",
    prompt_token_ids=(0,),
    sampling=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
)


class Scheduler:
    """Owns every sequence and block of one engine.

    Call order: any number of submit and cancel, then `schedule`, then `update` (or `fail`) with the result of
    the oldest plan not yet answered. With overlap, one more plan may be made before the answer. Events
    collect in between, until `drain_events`. `window`, `attention_balance`, `whole_prompts` and
    `shares_prefixes` are the model's (see ModelFacts).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        memory: MemoryPlan,
        *,
        model: str,
        num_host_blocks: int = 0,
        window: int | None = None,
        speed: MeasuredSpeed = NOT_MEASURED,
        adapters: AdapterSlots | None = None,
        attention_balance: float = math.inf,
        whole_prompts: bool = False,
        shares_prefixes: bool = True,
        tiers: PrefixTiers = NO_TIERS,
    ) -> None:
        cache = KvCache(
            num_blocks=memory.num_block_ids or memory.num_blocks,
            block_size=memory.block_size,
            prefix_caching=cache_config.prefix_caching and shares_prefixes,
            num_host_blocks=num_host_blocks,
            window=memory.window if memory.num_window_blocks else window,
            num_window_blocks=memory.num_window_block_ids or memory.num_window_blocks,
            division=_division_of(memory),
            disk=tiers.disk,
            num_states=memory.num_states,
            max_num_seqs=config.max_num_seqs,
            state_interval=memory.state_interval,
        )
        if whole_prompts:
            # A text holds its slot for a step, so that slots say nothing of who had more: tokens do.
            config = msgspec.structs.replace(config, fairness_band_tokens=1)
        self._model = model
        self._memory = memory
        host_s_per_token = memory.kv_bytes_per_token / cache_config.host_bytes_per_s
        disk_s_per_token = memory.kv_bytes_per_token / cache_config.disk_bytes_per_s
        rate = StepRate.of(speed, attention_balance)
        self._state = state = SchedulerState(
            config, cache, rate, host_s_per_token, disk_s_per_token, peers=tiers.peers
        )
        state.whole_prompts = whole_prompts
        state.full_blocks_alone = cache_config.shares_full_blocks_alone
        if adapters is not None:
            state.adapters = adapters
        self._forgotten, self._adapter = ForgottenRoom(state, memory), AdapterNeed(state)
        self._prefix: PrefixNeed | None = None
        self._planner = Planner(self._state)
        if state.disk_prefixes is not None:
            self._prefix = PrefixNeed(state, state.disk_prefixes, self._planner.admitter)
        self._results = ResultHandler(self._state)
        # For simulators, which skip over steps that only go on.
        self.plain_steps = PlainSteps(self._state, self._planner)
        # While somebody is looked for who makes steps fail.
        self._isolation: FailureIsolation[Sequence] | None = None
        # Since a probe began, until what became of it was left out of the events.
        self._has_probed = False
        self._door = Door(config, state.line, state.shares, state.speed, state.traffic)
        # (moment, request id), lazily cleaned.
        self._deadlines: list[tuple[float, int]] = []

    # Requests.

    def submit(self, request: Request, now: float, *, waited_for: str = "") -> None:
        """Accepts the request into the queue, or ends it at once with an event that says why not.
        `waited_for` names what has kept it from the queue since its arrival.

        Once accepted it is kept until it has been served, cancelled, or nobody wants it any more.
        """
        group = RequestGroup(request)
        failure = self._refusal(group, now)
        if failure is not None:
            self._state.events.append(TokenEvent.of_failure(request, failure))
            return
        self._enter(group, now, waited_for)

    def _enter(self, group: RequestGroup, now: float, waited_for: str = "") -> None:
        """Puts a request into the queue."""
        request = group.request
        if not group.sequences:
            group.sequences.append(self._new_sequence(group, 0))
        if group.is_beam_search:
            self._state.searches[request.request_id] = BeamSearch(request.sampling)
        for index in range(1, 1 if group.is_beam_search else request.sampling.best_of):
            group.sequences.append(self._new_sequence(group, index))
        first, *others = group.sequences
        first.waiting_for = waited_for
        self._state.held_back.begins(first, now)
        for sequence in others:
            sequence.status = Status.HELD
            sequence.fork_parent = first
        self._state.groups[request.request_id] = group
        self._state.shares.enter(first.account)
        self._state.traffic.arrived(first.account, first.num_slots, now)
        self._state.wait(first)
        if request.adapter:
            self._state.adapters.expect(request.adapter)
            self._state.awaits(self._adapter)
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, request.request_id))

    def cancel(self, request_id: int, now: float, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """Ends what is left of the request; False when it has ended already."""
        group = self._state.groups.get(request_id)
        if group is None:
            return False
        if group.is_beam_search:
            # Copies of one another, with their steps.
            num_steps = max(each.took.num_steps + self._num_steps_in_flight(each) for each in group.sequences)
            tokens = self._state.searches[request_id].num_tokens
            events = [
                TokenEvent(
                    request_id=request_id,
                    choice_index=group.request.choice_index + index,
                    finish_reason=reason,
                    statistics=ChoiceHistory(num_steps=num_steps, candidate_tokens=0 if index else tokens),
                )
                for index in range(group.request.sampling.n)
            ]
            self._state.finish_beams(group, events, now)
            return True
        for sequence in group.sequences:
            if not sequence.is_finished:
                # Steps in flight are charged as well, because they are computed although their tokens are not
                # sent.
                sequence.took.num_steps += self._num_steps_in_flight(sequence)
                self._state.finish(sequence, reason, now)
        return True

    def _num_steps_in_flight(self, sequence: Sequence) -> int:
        steps = self._state.in_flight
        return sum(sequence.sequence_id in step.rows for step in steps if not step.void)

    def fail_request(self, request_id: int, failure: RequestFailure) -> bool:
        """Ends the request with an error; False when it has ended already."""
        group = self._state.groups.get(request_id)
        if group is None:
            return False
        self._state.fail_group(group, failure)
        return True

    def fail_all(self, failure: RequestFailure) -> None:
        """Ends every request with the same error: nothing can be computed any more."""
        self._isolation = None
        for group in list(self._state.groups.values()):
            self._state.fail_group(group, failure)

    # Steps.

    def schedule(self, now: float) -> SchedulerOutput:
        """Plans the next step; one without rows and releases need not be launched."""
        self._expire(now)
        return self._planner.plan(now, None if self._isolation is None else self._isolation.allowed())

    def update(self, result: StepResult, now: float) -> None:
        """Takes in the result of the oldest plan not yet answered."""
        step = self._state.in_flight.popleft()
        assert step.step_id == result.step_id, f"result of step {result.step_id}, expected {step.step_id}"
        assert not result.failure, "a failed step goes to fail()"
        if step.void:
            self._results.costs.book_lost(step, result.compute_s)
            return
        if step.rows and self._isolation is not None:
            self._convict(self._isolation.succeeded())
            if not self._isolation.active:
                self._isolation = None
        self._results.apply(step, result, now)

    def fail(self, step_id: int, cause: str, now: float, *, seconds: float = 0.0) -> bool:
        """Takes in that the oldest plan not yet answered failed as a whole, after so many seconds; False: the
        runner is broken.
        """
        step = self._state.in_flight.popleft()
        assert step.step_id == step_id, f"failure of step {step_id}, expected {step.step_id}"
        self._results.costs.book_lost(step, seconds)
        if step.void:
            return True
        rows = [row for row in step.rows.values() if not row.sequence.is_finished]
        self._state.reset_running(now)
        suspects = [(row.sequence, row.start + row.num_tokens) for row in rows]
        isolation = self._isolation = self._isolation or FailureIsolation()
        works = isolation.failed(suspects, cause, num_ended=len(step.rows) - len(rows))
        if works and isolation.wants_probe:
            group = RequestGroup(_PROBE)
            self._enter(group, now)
            isolation.probe(group.sequences[0])
            self._has_probed = True
        return works

    def _convict(self, guilty: list[tuple[Sequence, str]]) -> None:
        """Ends those who make steps fail, each with an error of its own."""
        for sequence, cause in guilty:
            if not sequence.is_finished:
                self._state.fail_group(sequence.group, poisoned(cause))

    @property
    def isolating(self) -> bool:
        """Whether a failure is being isolated, or a void step is in flight; steps must not overlap then."""
        is_looking = self._isolation is not None and self._isolation.active
        return is_looking or any(step.void for step in self._state.in_flight)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._state.groups)

    @property
    def num_unreferenced_blocks(self) -> int:
        """Blocks that no sequence holds: free and cached ones."""
        return self._state.cache.num_available

    @property
    def num_total_blocks(self) -> int:
        """All blocks of the device."""
        return self._state.cache.num_present

    @property
    def num_touched_blocks(self) -> int:
        """Blocks that were written at least once since the start."""
        return self._state.cache.num_touched

    @property
    def has_work(self) -> bool:
        """Whether a plan made now could contain anything."""
        return bool(self._state.groups or self._state.released or self._state.outlived)

    @property
    def is_loading(self) -> bool:
        """Whether an adapter, or a prefix from disk, is on its way, for which somebody may wait."""
        return bool(self._state.on_the_way)

    @property
    def loaded_adapters(self) -> tuple[str, ...]:
        """Adapters that are in slots."""
        return self._state.adapters.names

    def adapters_asked_for(self) -> set[str]:
        """Adapters of the requests that have not ended."""
        return {group.request.adapter for group in self._state.groups.values()}

    def next_deadline_s(self) -> float | None:
        """Moment at which `schedule` must be called though nothing else happens."""
        first = self._deadlines[0][0] if self._deadlines else None
        held = None if self._state.peers is None else self._state.cache.pins.next_end_s()
        return min((each for each in (first, held) if each is not None), default=None)

    def release(self, ticket: bytes) -> None:
        """Lets go what is held for another engine under a ticket; nothing happens where nothing is."""
        self._state.release(ticket)

    def drain_events(self) -> list[TokenEvent]:
        """What happened since the last call, in order."""
        events, self._state.events = self._state.events, []
        if self._has_probed:
            events = [event for event in events if event.request_id != _PROBE.request_id]
            self._has_probed = _PROBE.request_id in self._state.groups
        withheld, self._state.withheld = self._state.withheld, {}
        events += (
            TokenEvent(request_id=request_id, withheld_tokens=num_tokens)
            for request_id, num_tokens in withheld.items()
            if num_tokens
        )
        return events

    def drain_kv_events(self) -> tuple[KvEvent, ...]:
        """Changes of the prefix cache since the last call."""
        return self._state.cache.drain_events()

    def load(self, now: float) -> SchedulerLoad:
        """The present load."""
        state, speed = self._state, self._state.speed
        oldest = state.line.oldest()
        if state.cache.disk is not None:
            state.totals.disk = state.cache.disk.counters()
        if state.peers is not None:
            state.totals.hand_over = state.peers.counters()
        return SchedulerLoad(
            num_running=len(state.running),
            num_waiting=len(state.waiting),
            pending_prefill_tokens=state.line.pending_tokens
            + sum(
                sequence.prefill_end - sequence.num_computed
                for sequence in state.running
                if sequence.prefill_end > sequence.num_computed
            ),
            num_free_blocks=state.cache.num_available,
            num_cached_blocks=state.cache.num_evictable,
            num_total_blocks=state.cache.num_present,
            prefill_tokens_per_s=speed.prefill_tokens_per_s,
            decode_tokens_per_s=speed.decode_tokens_per_s,
            oldest_wait_s=now - oldest.request.arrival_s if oldest else 0.0,
            prefix_queried_tokens=state.totals.prefix_queried_tokens,
            prefix_hit_tokens=state.totals.prefix_hit_tokens,
            num_preemptions=state.totals.num_preemptions,
            step_p50_s=speed.step_p50_s,
            counters=state.totals,
        )

    def check_invariants(self) -> None:
        """Raises AssertionError with the first thing that does not add up."""
        self._state.check_invariants()

    # Inside.

    def _new_sequence(self, group: RequestGroup, index: int) -> Sequence:
        request = group.request
        sampling = request.sampling
        if index and sampling.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        if group.is_beam_search:
            sampling = msgspec.structs.replace(sampling, temperature=0.0, logprobs=2 * sampling.beam_width)
        elif group.best_of is not None and sampling.logprobs is None:
            sampling = msgspec.structs.replace(sampling, logprobs=0)
        block_size = self._state.cache.block_size
        kept, max_tokens_total = kept_of(request, self._memory), tokens_limit(request, self._memory)
        if request.hand_over:
            # The first token is drawn, under the options of the whole answer.
            num_known = len(request.prompt_token_ids) + len(request.output_token_ids)
            max_tokens_total = min(max_tokens_total, num_known + 1)
        return Sequence(
            sequence_id=next(self._state.ids),
            group=group,
            choice_index=request.choice_index + index,
            sampling=sampling,
            max_tokens_total=max_tokens_total,
            hasher=PrefixHasher(
                model=self._model,
                adapter=request.adapter,
                salt=request.cache_salt,
                block_size=block_size,
                # What is computed of more than it looks back on is like nobody else's.
                most_tokens=None if kept is None else kept.start,
            ),
            kept=kept,
            needs=self._needs_of(request, kept),
        )

    def _needs_of(self, request: Request, kept: KeptBlocks | None) -> tuple[Need, ...]:
        """In the order in which they are asked for."""
        found: list[Need] = []
        if kept is not None and kept.is_measured:
            found.append(self._forgotten)
        if request.adapter:
            found.append(self._adapter)
        if self._prefix is not None:
            found.append(self._prefix)
        return tuple(found)

    def _refusal(self, group: RequestGroup, now: float) -> RequestFailure | None:
        """Why the request is not accepted; None with its first sequence in the group when it is."""
        request, state = group.request, self._state
        max_num_seqs, block_size = state.config.max_num_seqs, state.cache.block_size
        failure = refuse_impossible(request, self._memory, max_num_seqs)
        if failure is not None:
            return failure
        group.sequences.append(self._new_sequence(group, 0))
        num_tokens = state.prefixes.num_to_compute(group.sequences[0], state.running)
        batch = Batch(
            max_num_seqs,
            state.running,
            block_size,
            state.promises.num_free(),
            num_free_window_blocks=state.promises.num_free_window_blocks(),
            most_window_blocks=state.cache.most_window_blocks,
            block_bytes=(self._memory.block_bytes, self._memory.window_block_bytes)
            if self._memory.num_block_ids
            else None,
        )
        return self._door.refusal(request, num_tokens, batch, now)

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            self.cancel(request_id, now, FinishReason.DEADLINE)
        if self._state.peers is not None:
            for ticket in self._state.cache.pins.ended(now):
                self._state.release(ticket)


def _division_of(memory: MemoryPlan) -> Division | None:
    """How blocks and window blocks share their memory at first; None where that stays as it is."""
    if not memory.num_block_ids:
        return None
    return Division(
        num_blocks=memory.num_blocks,
        num_window_blocks=memory.num_window_blocks,
        block_bytes=memory.block_bytes,
        window_block_bytes=memory.window_block_bytes,
    )
