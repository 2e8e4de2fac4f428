"""Builds one step's plan: decodes first, then prefill chunks and admissions by rank, under one token budget.

A sequence is planned by positions alone, so prefill chunks, decodes, prefix hits, resumed sequences, forced
tokens and drafts to verify are the same rule: compute [num_computed, num_computed + n).
"""

from __future__ import annotations

from collections.abc import Sequence as Run

from engine.policy.shares import Account
from engine.scheduler.admitter import Admitter
from engine.scheduler.plan_draft import PlanDraft, RowWriter
from engine.scheduler.prefixes import BlocksUnderWay
from engine.scheduler.sequence import Sequence, Status
from engine.scheduler.state import SchedulerState, StepInFlight
from engine.scheduler.step_room import StepRoom
from engine.types import SchedulerOutput


class Planner:
    """Makes plans from the state. `allowed` restricts a plan to some sequences, to isolate a failure."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._config = state.config
        self._next_step_id = 1
        self._rows = RowWriter(state)
        self.admitter = Admitter(state, self._rows)
        self._room = StepRoom(state)

    def plan(self, now: float, allowed: frozenset[int] | None = None) -> SchedulerOutput:
        """The next step. Empty when nobody can compute anything and nothing needs to be released."""
        state = self._state
        state.cache.begin_step()
        if state.on_the_way:
            state.on_the_way = [need for need in state.on_the_way if need.begin_step()]
        budget = self._config.max_num_batched_tokens
        contended = len(state.running) + len(state.waiting) > 1
        long_budget = max(1, int(budget * self._config.long_prefill_share)) if contended else budget
        # While a failure is isolated, nobody waits for others: those may not be allowed to run.
        shares = bool(allowed is None and state.cache.prefix_caching and state.waiting)
        draft = PlanDraft(
            step_id=self._next_step_id,
            now=now,
            budget=budget,
            long_budget=long_budget,
            under_way=BlocksUnderWay(state.running, state.cache.block_size) if shares else None,
        )
        if allowed is None:
            self.admitter.displace_beams(draft)
        prefills = self._plan_decodes(draft, allowed)
        if prefills or state.waiting:
            sharers = self._sharers(prefills)
            waited_for = draft.rows or len(sharers) > 1 or state.traffic.had_several(now)
            if waited_for and allowed is None:
                long_share = self._config.long_prefill_share if contended else 1.0
                draft.limit(self._room.limits(draft, prefills, sharers), long_share, sharers)
            else:
                state.held_back.plans((), now)
            self._plan_prefills(draft, prefills, allowed)
        else:
            self._room.nobody_waits(now)
        if draft.has_capacity or draft.someone_blocked:
            # A plan whose budget ran out before it came to the queue says nothing new.
            state.traffic.freed.run(now, running=draft.someone_blocked)
        if state.running and not draft.rows and not state.in_flight and allowed is None:
            state.retreat(now)
        return self._seal(draft)

    def plain(self, start_s: float, ends_s: Run[float]) -> None:
        """What plans would have left that have nothing but a next token for everybody (see PlainSteps)."""
        state = self._state
        self._room.nobody_waits(start_s)
        if len(state.running) < self._config.max_num_batched_tokens:
            state.traffic.freed.run(start_s, running=False)
            state.traffic.freed.run(ends_s[-2] if len(ends_s) > 1 else start_s, running=False)
        self._next_step_id += len(ends_s)

    def _sharers(self, prefills: list[Sequence]) -> set[Account]:
        """Whose prompts are computed, or wait with a slot left for them."""
        accounts = {each.account for each in prefills}
        if len(self._state.running) < self._config.max_num_seqs:
            accounts |= self._state.line.accounts
        return accounts

    def _seal(self, draft: PlanDraft) -> SchedulerOutput:
        state = self._state
        copies, offloads, restores = state.cache.drain_transfers()
        # A plan without rows may be thrown away.
        states = state.cache.states
        of_states = states.drain() if draft.rows and states is not None else ((), (), ())
        window_blocks, window_copies = state.cache.drain_window_blocks() if draft.rows else ((), ())
        retired, retired_in_windows = state.cache.drain_retired() if draft.rows else ((), ())
        state.totals.offloaded_blocks += len(offloads)
        copied = {parent for parent, _ in draft.forks}
        plan = SchedulerOutput(
            step_id=draft.step_id,
            new_sequences=tuple(draft.new.values()),
            scheduled=draft.scheduled(),
            released=(*state.released, *(each for each in state.outlived if each not in copied)),
            block_copies=copies,
            offloads=offloads,
            restores=restores,
            forks=tuple(draft.forks),
            state_copies=of_states[0],
            state_offloads=of_states[1],
            state_restores=of_states[2],
            window_blocks=window_blocks,
            window_copies=window_copies,
            retired_blocks=retired,
            retired_window_blocks=retired_in_windows,
        )
        for sequence in draft.computed_prompts:
            state.release_held(sequence.group, draft.now)
        if plan.scheduled or plan.released:
            # The runner drops states before it copies them, so copied ones go with the next plan.
            state.released = [each for each in state.outlived if each in copied]
            state.outlived.clear()
            expected_s = self._room.planned(draft)
            step = StepInFlight(draft.step_id, draft.now, draft.rows, draft.num_possible, expected_s)
            state.in_flight.append(step)
            self._next_step_id += 1
        return plan

    # Decodes.

    def _plan_decodes(self, draft: PlanDraft, allowed: frozenset[int] | None) -> list[Sequence]:
        """Plans every decoding sequence; returns those that are still computing their prompt, by rank."""
        prefills: list[Sequence] = []
        decodes: list[Sequence] = []
        for sequence in self._state.running:
            if allowed is None or sequence.sequence_id in allowed:
                (prefills if sequence.remaining_prefill else decodes).append(sequence)
        for position, sequence in enumerate(decodes):
            if self._rows.add_next(draft, sequence):
                continue
            if sequence.status is Status.RUNNING and self._has_next_token(sequence):
                # Everyone behind gets at least one token; drafts share what is left.
                self._plan_decode(draft, sequence, draft.budget - (len(decodes) - position - 1))
        return [sequence for sequence in prefills if sequence.status is Status.RUNNING]

    @staticmethod
    def _has_next_token(sequence: Sequence) -> bool:
        if sequence.num_expected >= sequence.max_tokens_total:
            return False
        if sequence.is_beam and sequence.num_pending:
            # A beam's next token is unknown until all beams are ranked, so nothing can be planned ahead.
            return False
        return sequence.num_expected > sequence.num_computed

    def _plan_decode(self, draft: PlanDraft, sequence: Sequence, budget: int) -> None:
        if sequence.table.draft_copies:
            # From which state it goes on is known when its drafts are.
            return
        start, remaining = sequence.num_computed, sequence.num_expected - sequence.num_computed
        num_tokens = sequence.end_of_row(start, start + min(remaining, max(1, budget))) - start
        drafts = self._drafts_behind(sequence, num_tokens, budget - remaining)
        if drafts and not self._fits(sequence, start, start + num_tokens + len(drafts)):
            drafts = ()
        num_tokens += len(drafts)
        while not self._fits(sequence, start, start + num_tokens):
            if self._waits_for_own(sequence, start, start + num_tokens):
                return
            victim = self._lowest_below(draft, sequence)
            self._state.preempt(victim, "kv_pressure", draft.now)
            draft.preempted_for_blocks = True
            if victim is sequence:
                return
        self._rows.add(draft, sequence, num_tokens, drafts)

    def _drafts_behind(self, sequence: Sequence, num_tokens: int, budget: int) -> tuple[int, ...]:
        """Of the sequence's drafts those that may follow a row of its next `num_tokens` tokens. Where it has
        forgotten something there are none: a row that goes back behind a rejected one would look at another
        block than it would have alone.
        """
        states, kept = self._state.cache.states, sequence.kept
        capacity = sequence.max_tokens_total - sequence.num_expected - 1
        drafts = sequence.draft_token_ids[: max(0, min(capacity, budget))] if budget >= 0 else ()
        if states is not None:
            drafts = drafts[: states.most_drafts]
        if kept is not None and sequence.num_computed + num_tokens + len(drafts) > kept.start:
            return ()
        return drafts

    def _fits(self, sequence: Sequence, start: int, end: int) -> bool:
        cache, table = self._state.cache, sequence.table
        needed = cache.num_new_blocks(table, start, end), cache.num_new_window_blocks(table, start, end)
        return not any(needed) or self._state.promises.find_room(*needed, besides=sequence)

    def _fits_blocks(self, sequence: Sequence, start: int, end: int) -> bool:
        needed = self._state.cache.num_new_blocks(sequence.table, start, end)
        return not needed or needed <= self._state.promises.num_free(besides=sequence)

    def _waits_for_own(self, sequence: Sequence, start: int, end: int) -> bool:
        """Whether all that the sequence lacks are blocks of its own that its steps in flight give up: window
        blocks, or those that it forgets.
        """
        table, in_flight, kept = sequence.table, self._state.in_flight, sequence.kept
        if not any(sequence.sequence_id in step.rows for step in in_flight):
            return False
        if kept is not None:
            num_seen = start // self._state.cache.block_size + 1 - kept.num_hidden(start)
            return start >= kept.start and table.num_held > num_seen
        is_full = table.num_in_window >= self._state.cache.most_window_blocks
        return is_full and self._fits_blocks(sequence, start, end)

    def _lowest_below(self, draft: PlanDraft, sequence: Sequence) -> Sequence:
        for victim in reversed(self._state.running):
            if victim is sequence:
                break
            if not victim.boosted and victim.sequence_id not in draft.rows:
                return victim
        assert not self._state.promises.has(sequence), "a promised block is missing"
        return sequence

    # Prefill chunks and admissions.

    def _plan_prefills(
        self, draft: PlanDraft, prefills: list[Sequence], allowed: frozenset[int] | None
    ) -> None:
        """Running prefills and waiting sequences, merged by tier; inside a tier who runs goes first."""
        skipped: set[int] = set()
        running = iter(prefills)
        chunk = next(running, None)
        while draft.has_capacity:
            # New work is not taken in while running work is short of blocks.
            candidate = (
                None if draft.preempted_for_blocks else self.admitter.candidate(draft, skipped, allowed)
            )
            if chunk is not None and (candidate is None or chunk.priority >= candidate.priority):
                self._add_chunk(draft, chunk)
                chunk = next(running, None)
            elif candidate is None or not self.admitter.admit_or_skip(draft, candidate, skipped):
                break
        while chunk is not None and draft.has_capacity:
            self._add_chunk(draft, chunk)
            chunk = next(running, None)

    def _chunk_fits(self, sequence: Sequence) -> bool:
        """Whether there is room for the next part of a prompt; all of it has blocks, but for window blocks,
        and for what is computed again of an answer that forgets.
        """
        if sequence.kept is None:
            return self._rows.window_room(sequence, 1) > 0
        start = sequence.num_computed
        return self._fits(sequence, start, sequence.end_of_row(start, sequence.prefill_end))

    def _add_chunk(self, draft: PlanDraft, sequence: Sequence) -> None:
        """The next part of a prompt. Whoever is of a lower rank makes room for it, unless the sequence itself
        is about to.
        """
        while sequence.status is Status.RUNNING and not self._chunk_fits(sequence):
            start = sequence.num_computed
            if self._waits_for_own(sequence, start, start + 1):
                return
            victim = self._lowest_below(draft, sequence)
            if victim is sequence:
                # Those of a higher rank go on and end; where there are none, `retreat` finds room.
                return
            self._state.preempt(victim, "kv_pressure", draft.now)
            draft.preempted_for_blocks = True
        self._rows.add_chunk(draft, sequence)
