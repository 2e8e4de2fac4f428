"""What planning and result handling share: the sequences, where they are, and how they end."""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field
from itertools import chain, count

from contract.errors import Reason
from engine.config import SchedulerConfig
from engine.kv import BlockPeers, KvCache
from engine.policy.line import Line, Waiter
from engine.policy.rates import StepRate, Traffic
from engine.policy.shares import Shares
from engine.scheduler.adapters import AdapterSlots
from engine.scheduler.beams import BeamSearch, Candidate
from engine.scheduler.disk_prefixes import DiskPrefixes
from engine.scheduler.held_back import HeldBack
from engine.scheduler.prefixes import Prefixes
from engine.scheduler.sequence import Need, RequestGroup, Sequence, Status
from engine.types import (
    ChoiceHistory,
    FinishReason,
    RequestFailure,
    SchedulerCounters,
    TokenEvent,
)


@dataclass(slots=True)
class Row:
    """One sequence's part of a step in flight."""

    sequence: Sequence
    epoch: int
    start: int
    num_tokens: int
    samples: bool
    draft_token_ids: tuple[int, ...] = ()
    # Who proposed them.
    drafter: str = ""
    is_prefill: bool = False
    is_long: bool = False
    # Tokens of the row that had been computed before, and were lost by a preemption.
    num_recomputed: int = 0
    # Work of a prompt's row, in the unit of `StepRate`.
    work: float = 0.0
    # Leading blocks that this row reports to the runner as given up.
    num_given_up: int = 0
    # Copies of its state that the row leaves on the way.
    snapshots: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class StepInFlight:
    """A plan that was handed out and whose result has not come back."""

    step_id: int
    planned_s: float
    rows: dict[int, Row]
    # Tokens that it might have had.
    budget: int
    # How long it is expected to take.
    expected_s: float = 0.0
    # A step before it failed: what it computed rests on nothing.
    void: bool = False


class Promises:
    """Running sequences, and beam searches, that find all blocks which they can still need: they may not be
    preempted any more.
    """

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._alone: dict[int, Sequence] = {}
        self._searches: dict[int, RequestGroup] = {}

    def make(self, sequence: Sequence) -> None:
        """All blocks that the sequence, or its beam search, can still need are free: they stay so for it."""
        group = sequence.group
        if not group.is_beam_search:
            self._alone[sequence.sequence_id] = sequence
            return
        self._searches[group.request.request_id] = group
        for beam in group.sequences:
            beam.awaits_promise = beam.boosted = True

    def stopped(self, sequence: Sequence) -> None:
        """The sequence has lost its slot. What a search is promised outlives the slots of its beams."""
        self._alone.pop(sequence.sequence_id, None)

    def ended(self, group: RequestGroup) -> None:
        """Nothing is left of the request."""
        self._searches.pop(group.request.request_id, None)

    def has(self, sequence: Sequence) -> bool:
        """Whether all blocks that the sequence can still need are kept free for it."""
        return sequence.sequence_id in self._alone or sequence.group.request.request_id in self._searches

    def num_reserved(self, *, besides: Sequence | None = None) -> int:
        """Blocks promised, those of `besides` left out."""
        if not self._alone and not self._searches:
            return 0
        own = None if besides is None else besides.group
        alone = (each for each in self._alone.values() if each is not besides)
        beams = (each for each in self._searches.values() if each is not own)
        return sum(map(self._reserve_of, alone)) + sum(map(self.reserve_of_beams, beams))

    def num_free(self, *, besides: Sequence | None = None) -> int:
        """Blocks that nobody holds and that are promised to nobody but `besides`."""
        return self._cache.num_available - self.num_reserved(besides=besides)

    def num_reserved_window_blocks(self, *, besides: Sequence | None = None) -> int:
        """The same, of the blocks of layers that have a window, where others have none."""
        if not self._cache.has_window_blocks or not (self._alone or self._searches):
            return 0
        own = None if besides is None else besides.group
        alone = (each for each in self._alone.values() if each is not besides)
        beams = (each for each in self._searches.values() if each is not own)
        return sum(map(self._window_reserve_of, alone)) + sum(map(self.window_reserve_of_beams, beams))

    def num_free_window_blocks(self, *, besides: Sequence | None = None) -> int:
        """Those that nobody holds and that are promised to nobody but `besides`."""
        return self._cache.num_available_window_blocks - self.num_reserved_window_blocks(besides=besides)

    def find_room(self, num_blocks: int, num_window_blocks: int, *, besides: Sequence) -> bool:
        """Whether so many blocks and window blocks can be had that are promised to nobody but `besides`; the
        division between both kinds follows.
        """
        # What is promised to it beyond that stays as well.
        blocks = max(num_blocks + self.num_reserved(besides=besides), self.num_reserved())
        others = self.num_reserved_window_blocks(besides=besides)
        windows = max(num_window_blocks + others, self.num_reserved_window_blocks())
        return self._cache.make_room(blocks, windows)

    def _window_reserve_of(self, sequence: Sequence) -> int:
        """Window blocks that the sequence may still come to need. Those that others hold as well do not
        count as its own, since they do not come free when it leaves them behind.
        """
        cache, table = self._cache, sequence.table
        growth = cache.blocks_for(sequence.max_tokens_total - 1) - table.window_end
        return max(0, min(cache.most_window_blocks - cache.num_alone_in_window((table,)), growth))

    def window_reserve_of_beams(self, group: RequestGroup) -> int:
        """The same of a beam search."""
        cache = self._cache
        longest = cache.blocks_for(group.sequences[0].max_tokens_total - 1)
        most = group.request.sampling.beam_width * min(cache.most_window_blocks, longest)
        return max(0, most - cache.num_alone_in_window(beam.table for beam in group.sequences))

    def _reserve_of(self, sequence: Sequence) -> int:
        """Blocks that the sequence may still come to need, those that it will give up not counted against
        them: others may share these, and then they do not come free.
        """
        if sequence.kept is not None and not sequence.is_beam:
            table, num_tokens = sequence.table, sequence.max_tokens_total - 1
            num_own = len(table) - max(table.num_given_up, min(sequence.kept.first_own, len(table)))
            if sequence.kept.is_renewed:
                num_own = table.num_held
            return sequence.kept.num_to_come(len(table), num_own, num_tokens)
        return max(0, self._cache.blocks_for(sequence.max_tokens_total - 1) - len(sequence.table))

    def reserve_of_beams(self, group: RequestGroup) -> int:
        """Blocks that a beam search may still come to need: at worst its beams end up sharing nothing."""
        held = {block_id for beam in group.sequences for block_id in beam.table.block_ids}
        most = self._cache.blocks_for(group.sequences[0].max_tokens_total - 1)
        return max(0, group.request.sampling.beam_width * most - len(held))

    def waiting_beam(self, skipped: set[int]) -> Sequence | None:
        """A beam that lost its slot while the blocks of its search are promised."""
        for group in self._searches.values():
            for beam in group.sequences:
                if beam.status is Status.WAITING and beam.sequence_id not in skipped:
                    return beam
        return None


@dataclass
class SchedulerState:
    """The sequences, and the books that are kept of them. Methods keep these whole; each is one move of one
    sequence or group.
    """

    config: SchedulerConfig
    cache: KvCache
    speed: StepRate
    # Seconds for copying one token's keys and values back from host memory.
    host_s_per_token: InitVar[float]
    # And for reading them from disk.
    disk_s_per_token: InitVar[float] = 0.0
    # Other engines, which blocks go to and come from.
    peers: BlockPeers | None = None
    adapters: AdapterSlots = field(default_factory=AdapterSlots)
    traffic: Traffic = field(default_factory=Traffic)
    # Prompts are computed in one step each: an encoder's.
    whole_prompts: bool = False
    # A block that is not full is gone on with by its own sequence alone: forks compute theirs again.
    full_blocks_alone: bool = False
    held_back: HeldBack = field(default_factory=HeldBack)
    shares: Shares = field(init=False)
    line: Line = field(init=False)
    promises: Promises = field(init=False)
    prefixes: Prefixes = field(init=False)
    # Where prefixes may come from a disk, or from another engine.
    disk_prefixes: DiskPrefixes | None = None
    # Needs for which something is on its way.
    on_the_way: list[Need] = field(default_factory=list)
    # Those in the line, by id, in order of joining.
    waiting: dict[int, Sequence] = field(default_factory=dict)
    groups: dict[int, RequestGroup] = field(default_factory=dict)
    # Beam searches by request id, for the requests that ask for one.
    searches: dict[int, BeamSearch] = field(default_factory=dict)
    # Sorted by rank.
    running: list[Sequence] = field(default_factory=list)
    in_flight: deque[StepInFlight] = field(default_factory=deque)
    # When the last step came back.
    last_result_s: float = 0.0
    # Sequences whose state the runner must drop with the next plan.
    released: list[int] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)
    # How much more is computed of answers that are sent at the end: their gateway may not live to hear it.
    withheld: dict[int, int] = field(default_factory=dict)
    # Parents of beams: the runner's state of them is copied with the next plan, and dropped after it.
    outlived: list[int] = field(default_factory=list)
    # Numbers of sequences, never used before.
    ids: Iterator[int] = field(default_factory=lambda: count(1))
    totals: SchedulerCounters = field(default_factory=SchedulerCounters)

    def __post_init__(self, host_s_per_token: float, disk_s_per_token: float) -> None:
        config = self.config
        self.shares = Shares(config.output_token_cost, config.fairness_band_tokens)
        self.line = Line(config, self.shares)
        self.promises = Promises(self.cache)
        if self.cache.disk is not None or (self.peers is not None and self.peers.receives):
            self.disk_prefixes = DiskPrefixes(self.cache, self.speed, disk_s_per_token, self.peers)
        self.prefixes = Prefixes(self.cache, self.line, self.speed, host_s_per_token, self.disk_prefixes)

    def adapters_in_use(self) -> set[str]:
        """Adapters that steps compute with: those of sequences that run, or left during a step."""
        rows = (row.sequence for step in self.in_flight for row in step.rows.values())
        return {each.adapter for each in chain(self.running, rows) if each.adapter}

    def admits_adapter(self, sequence: Sequence) -> bool:
        """Whether the sequence's adapter is there; else it is brought."""
        name = sequence.adapter
        return not name or self.adapters.admits(name, self.adapters_in_use())

    def awaits(self, need: Need) -> None:
        """Something was begun for a need: the next plans take in what comes of it."""
        if need not in self.on_the_way:
            self.on_the_way.append(need)

    def fail_adapter(self, name: str, problem: str) -> None:
        """Ends every request for an adapter that could not be loaded: its files are others, or gone."""
        failure = RequestFailure(reason=Reason.MODEL_NOT_FOUND.value, message=problem, field="adapter")
        for group in [each for each in self.groups.values() if each.request.adapter == name]:
            self.fail_group(group, failure)

    def wait(self, sequence: Sequence) -> None:
        """A sequence without a slot joins the queue."""
        num_tokens = self.prefixes.num_to_compute(sequence, self.running)
        self.waiting[sequence.sequence_id] = sequence
        waiter = Waiter(
            sequence.sequence_id,
            sequence.group.request,
            sequence.order,
            sequence.num_slots,
            num_tokens,
            prompt_s=self.speed.seconds_for(num_tokens),
            is_new=sequence.group.first_scheduled_s is None,
            hashes=tuple(sequence.hasher.hashes),
        )
        self.line.push(waiter)

    def admitted(self, sequence: Sequence, now: float) -> None:
        """A waiting sequence is about to start."""
        del self.waiting[sequence.sequence_id]
        if self.line.admitted(sequence.sequence_id, now):
            sequence.boosted = True

    def start_running(self, sequence: Sequence) -> None:
        """Puts a sequence among the running ones, by rank."""
        sequence.status = Status.RUNNING
        if sequence.awaits_promise:
            self.promises.make(sequence)
            # Beams rise with the first of them.
            self.running.sort(key=lambda each: each.rank)
        self.shares.acquire(sequence.account, sequence.group.request.weight)
        insort(self.running, sequence, key=lambda each: each.rank)

    def _stop_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.shares.release(sequence.account)
        self.promises.stopped(sequence)
        self.cache.free(sequence.table)
        if sequence.is_introduced:
            self.released.append(sequence.sequence_id)

    def retreat(self, now: float) -> None:
        """Nobody can go on: every running sequence is a beam that waits for a sibling which finds no room.
        The search of the lowest rank gives up its slots, so that another one comes to its end.
        """
        last = max(self.running, key=lambda each: (not self.promises.has(each), each.rank))
        counts = not self.promises.has(last)
        for beam in last.group.sequences:
            if beam.status is Status.RUNNING:
                self.preempt(beam, "kv_pressure", now, counts=counts)

    def preempt(
        self, sequence: Sequence, cause: str, now: float, *, counts: bool = True, shares: bool = False
    ) -> None:
        """Takes a running sequence's blocks away; it goes on later, from its tokens. With `shares` it makes
        room for an equal tenant, which is no step towards `max_preemptions`: its own keeps a share meanwhile.
        """
        self._stop_running(sequence)
        sequence.rewind()
        sequence.status = Status.WAITING
        sequence.waiting_for, sequence.waiting_since_s = cause, now
        self.held_back.begins(sequence, now)
        if counts:
            sequence.away_since_s = now
            sequence.took.num_preemptions += 1
            self.totals.preemptions[cause] = self.totals.preemptions.get(cause, 0) + 1
            sequence.num_forced += not shares
            if sequence.num_forced >= self.config.max_preemptions:
                sequence.boosted = True
                sequence.awaits_promise = True
        self.wait(sequence)

    def remember(self, sequence: Sequence, now: float) -> None:
        """Lets a sequence forget nothing any more: it is computed anew from its tokens, and what steps in
        flight draw for it is void.
        """
        if sequence.status is Status.RUNNING:
            self.preempt(sequence, "forgotten", now, shares=True)
        sequence.kept = sequence.table.kept = None
        sequence.whole_from = sequence.epoch

    def renew(self, sequence: Sequence, now: float) -> None:
        """Lets an answer go on that has come to the end of the model's positions. It keeps its slot, if it
        has one; what it takes along is computed as a prompt is, in blocks that it had.
        """
        assert not sequence.num_pending, "nothing is planned beyond the positions"
        if sequence.status is Status.RUNNING:
            self.cache.free(sequence.table)
            self.released.append(sequence.sequence_id)
        sequence.renew(now)
        self.totals.num_renewals += 1

    def reset_running(self, now: float) -> None:
        """A step failed: everything that ran goes back to the queue."""
        for step in self.in_flight:
            step.void = True
        for sequence in list(self.running):
            self.preempt(sequence, "", now, counts=False)
        for group in self.groups.values():
            for sequence in group.sequences:
                sequence.num_pending = 0
        if self.cache.has_host_tier:
            # Copies of the failed plan may not have happened.
            self.cache.forget_contents()
            for ticket in self.cache.pins.tickets:
                self.release(ticket)

    def hold(self, sequence: Sequence, now: float) -> None:
        """Holds the blocks of a sequence's prompt for another engine, as it asked, beyond its end."""
        peers, ticket = self.peers, sequence.group.request.hand_over
        if peers is None or not peers.sends:
            return
        num_blocks = min(sequence.num_prompt_tokens // self.cache.block_size, sequence.table.num_registered)
        block_ids = sequence.table.block_ids[:num_blocks]
        if num_blocks and self.cache.pins.hold(ticket, block_ids, now + peers.hold_s):
            peers.offer(ticket, tuple(zip(sequence.hasher.hashes, block_ids, strict=False)))

    def release(self, ticket: bytes) -> None:
        """Lets go what is held under a ticket, if anything still is."""
        if self.peers is not None:
            self.peers.withdraw(ticket)
        self.cache.pins.release(ticket)

    def finish(
        self, sequence: Sequence, reason: FinishReason, now: float, event: TokenEvent | None = None
    ) -> None:
        """Ends one choice with its terminal event, and the request with its last choice."""
        if sequence.status is Status.RUNNING:
            self.traffic.freed.count(now)
            self.speed.ended(sequence.num_output_tokens)
        self._remove(sequence)
        group = sequence.group
        group.num_finished += 1
        if event is None:
            event = TokenEvent(
                request_id=group.request.request_id,
                choice_index=sequence.choice_index,
                finish_reason=reason,
                statistics=sequence.history(now),
            )
        self.report(group, event)
        if group.num_finished == len(group.sequences):
            if group.best_of is not None:
                logprobs = {each.choice_index: each.mean_logprob for each in group.sequences}
                self._emit(group, *group.best_of.results(logprobs, reason))
            self._end_group(group)

    def report(self, group: RequestGroup, event: TokenEvent) -> None:
        """Sends an event out, or keeps it until the best choices are known."""
        if group.best_of is None:
            self._emit(group, event)
        else:
            group.best_of.collect(event)
            self.withheld[group.request.request_id] = group.best_of.num_tokens

    def fail_group(self, group: RequestGroup, failure: RequestFailure) -> None:
        """Ends the whole request with an error."""
        for sequence in group.sequences:
            if not sequence.is_finished:
                self._remove(sequence)
        self._emit(group, TokenEvent.of_failure(group.request, failure, ChoiceHistory()))
        self._end_group(group)

    def _emit(self, group: RequestGroup, first: TokenEvent, *others: TokenEvent) -> None:
        """Sends events out. The end of a choice, or of all, carries what was spent on the request so far."""
        if first.statistics is not None:
            first.statistics.engine_time = group.drain_engine_time()
        self.events += (first, *others)

    def release_held(self, group: RequestGroup, now: float) -> None:
        """The prompt is computed or will be: further choices may start."""
        for sequence in group.sequences:
            if sequence.status is Status.HELD:
                sequence.status = Status.WAITING
                # Until now it has waited for nobody but its own prompt.
                sequence.waiting_since_s = now
                self.wait(sequence)

    def _remove(self, sequence: Sequence) -> None:
        if sequence.status is Status.RUNNING:
            self._stop_running(sequence)
            sequence.epoch += 1
        elif sequence.status is Status.WAITING:
            if sequence.disk_read is not None and self.disk_prefixes is not None:
                self.disk_prefixes.leave(sequence)
            del self.waiting[sequence.sequence_id]
            self.line.remove(sequence.sequence_id)
        sequence.status = Status.FINISHED
        sequence.fork_parent = None

    def replace_beams(self, group: RequestGroup, candidates: list[Candidate], now: float) -> None:
        """Makes the candidates the request's beams; their parents end."""
        children = [self._beam(candidate) for candidate in candidates]
        for parent in group.sequences:
            self._remove(parent)
        if group.request.grammar is not None:
            # Children go on from where their parents stand in the grammar.
            parents = {parent.sequence_id for parent in group.sequences}
            self.outlived += [each for each in self.released if each in parents]
            self.released = [each for each in self.released if each not in parents]
        group.sequences = children
        for child in children:
            if child.table.block_ids and len(self.running) < self.config.max_num_seqs:
                self.start_running(child)
                continue
            # No slot, or the parent had lost its blocks: back to the queue, from its tokens.
            self.cache.free(child.table)
            child.rewind()
            child.waiting_since_s = now
            self.wait(child)

    def finish_beams(self, group: RequestGroup, events: list[TokenEvent], now: float) -> None:
        """Ends a beam search with its answers."""
        for sequence in group.sequences:
            if sequence.status is Status.RUNNING:
                self.traffic.freed.count(now)
            self._remove(sequence)
        self._emit(group, *events)
        self._end_group(group)

    def _beam(self, candidate: Candidate) -> Sequence:
        parent = candidate.parent
        child = parent.child(next(self.ids), candidate.token_id, candidate.logprob)
        can_start = self.cache.states is None or self.cache.states.can_start
        if parent.status is Status.RUNNING and can_start and not self.full_blocks_alone:
            self.cache.share(child.table, parent.table, parent.num_confirmed)
            child.num_computed = child.num_confirmed = parent.num_confirmed
        return child

    def _end_group(self, group: RequestGroup) -> None:
        del self.groups[group.request.request_id]
        self.promises.ended(group)
        self.searches.pop(group.request.request_id, None)
        self.withheld.pop(group.request.request_id, None)
        self.shares.leave(group.sequences[0].account)
        # They know their group as well: what is left of a request would wait for the garbage collector, which
        # holds up a step for as long as it looks.
        group.sequences = []

    def check_invariants(self) -> None:
        """Raises AssertionError with the first thing that does not add up."""
        live = [sequence for group in self.groups.values() for sequence in group.sequences]
        running = [sequence for sequence in live if sequence.status is Status.RUNNING]
        waiting = [sequence for sequence in live if sequence.status is Status.WAITING]
        assert {id(s) for s in running} == {id(s) for s in self.running}, "running list and statuses differ"
        assert len(running) == len(self.running) <= self.config.max_num_seqs, "too many running sequences"
        assert {id(s) for s in waiting} == {id(s) for s in self.waiting.values()}, "queue and statuses differ"
        assert list(self.waiting) == list(self.line), "queue and line differ"
        self.adapters.check_invariants(self.adapters_in_use())
        held = Counter(each.account for each in self.running)
        assert held == self.shares.slots, "slots and running sequences differ"
        ranks = [sequence.rank for sequence in self.running]
        assert ranks == sorted(ranks), "running sequences are out of rank"
        for sequence in live:
            where = f"sequence {sequence.sequence_id}"
            if sequence.status is not Status.RUNNING:
                assert not sequence.table.block_ids, f"{where} is {sequence.status} and holds blocks"
                continue
            assert sequence.num_confirmed <= sequence.num_computed, f"{where}: confirmed beyond computed"
            assert sequence.num_computed <= sequence.num_expected, f"{where}: computed beyond its tokens"
            table = sequence.table
            hidden = self.cache.num_behind(table, sequence.num_confirmed)
            assert max(table.num_given_up, table.window_start) <= hidden, f"{where} has given up what it sees"
            if self.cache.has_window_blocks:
                written = self.cache.blocks_for(sequence.num_computed)
                assert table.window_end >= written, f"{where}: computed beyond its window blocks"
            covered = len(sequence.table) * self.cache.block_size
            assert sequence.num_computed <= covered, f"{where}: computed beyond its blocks"
            assert sequence.num_known <= sequence.max_tokens_total, f"{where} is longer than its limit"
        self.cache.check_invariants(sequence.table for sequence in live)
        reserved = self.promises.num_reserved()
        assert reserved <= self.cache.num_available, f"{reserved} blocks promised, too few are available"
        reserved = self.promises.num_reserved_window_blocks()
        available = self.cache.num_available_window_blocks
        assert reserved <= available, f"{reserved} window blocks promised, {available} are available"
