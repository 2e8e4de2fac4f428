"""Builds one step's plan: decodes first, then prefill chunks and admissions by rank, under one token budget.

A sequence is planned by positions alone, so prefill chunks, decodes, prefix hits, resumed sequences, forced
tokens and drafts to verify are the same rule: compute [num_computed, num_computed + n).
"""

from __future__ import annotations

from collections import Counter

from engine.policy.pace import Answers, Pace, Prompts, chunk_work, pace_of
from engine.policy.shares import Account
from engine.scheduler.admitter import Admitter
from engine.scheduler.plan_draft import PlanDraft, RowWriter
from engine.scheduler.prefixes import BlocksUnderWay
from engine.scheduler.sequence import Sequence, Status
from engine.scheduler.state import Row, SchedulerState, StepInFlight
from engine.types import ScheduledSequence, SchedulerOutput


class Planner:
    """Makes plans from the state. `allowed` restricts a plan to some sequences, to isolate a failure."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._config = state.config
        self._next_step_id = 1
        self._rows = RowWriter(state)
        self._admitter = Admitter(state, self._rows)
        # Since when prompts that could be computed were not; None while there are none.
        self._prompts_since_s: float | None = None

    def plan(self, now: float, allowed: frozenset[int] | None = None) -> SchedulerOutput:
        """The next step. Empty when nobody can compute anything and nothing needs to be released."""
        state = self._state
        state.cache.begin_step()
        for name, problem in state.adapters.begin_step().items():
            state.fail_adapter(name, problem)
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
            self._admitter.displace_beams(draft)
        prefills = self._plan_decodes(draft, allowed)
        starts_s = max([now, *(step.ends_s for step in state.in_flight)])
        if prefills or state.waiting:
            sharers = self._sharers(prefills)
            if draft.rows or len(sharers) > 1 or state.traffic.had_several(now):
                long_share = self._config.long_prefill_share if contended else 1.0
                draft.limit(self._chunk_works(draft, prefills, sharers, starts_s), long_share, sharers)
            self._plan_prefills(draft, prefills, allowed)
        else:
            self._prompts_since_s = None
        if draft.has_capacity or draft.someone_blocked:
            # A plan whose budget ran out before it came to the queue says nothing new.
            state.traffic.freed.run(now, running=draft.someone_blocked)
        if state.running and not draft.rows and not state.in_flight and allowed is None:
            state.retreat(now)
        return self._seal(draft, starts_s)

    def _chunk_works(
        self, draft: PlanDraft, prefills: list[Sequence], sharers: set[Account], starts_s: float
    ) -> dict[int, float]:
        """Work of prompts that the step may hold, by the tier of who asks for it."""
        state, rows = self._state, draft.rows.values()
        answers = Answers(
            num_rows=draft.whole_budget - draft.budget,
            work=sum(state.speed.work(row.start, row.num_tokens) for row in rows),
            paces=[pace for row in rows if (pace := self._pace(row, starts_s)) is not None],
            starts_s=starts_s,
        )
        since_s = starts_s if self._prompts_since_s is None else self._prompts_since_s
        self._prompts_since_s = since_s if prefills or sharers else None
        waited_s = max(0.0, starts_s - since_s)
        works, late = self._prompts_by_tier(prefills), self._late_tiers(prefills, draft.now)
        limits, above, is_late = {}, 0, False
        for priority in sorted(works, reverse=True):
            above += works[priority]
            is_late |= priority in late
            prompts = Prompts(priority, above, waited_s, is_late)
            limits[priority] = chunk_work(
                state.speed.time, answers, prompts, self._config.step_target_ms / 1000
            )
        return limits

    def _prompts_by_tier(self, prefills: list[Sequence]) -> Counter[int]:
        """Tokens of prompts that could be computed, by tier."""
        works = self._state.line.tokens_by_tier()
        if len(self._state.running) >= self._config.max_num_seqs:
            works = Counter(dict.fromkeys(works, 0))
        for sequence in prefills:
            works[sequence.priority] += sequence.remaining_prefill
        return works

    def _late_tiers(self, prefills: list[Sequence], now: float) -> set[int]:
        """Tiers of prompts that can no longer have their first tokens in time."""
        deadlines = ((each.priority, each.group.request.ttft_deadline_s) for each in prefills)
        started = {priority for priority, due_s in deadlines if due_s is not None and due_s < now}
        return started | self._state.line.late_tiers(now)

    @staticmethod
    def _pace(row: Row, starts_s: float) -> Pace | None:
        """What the row's answer is owed; None where nobody reads it as it comes, or its tier has no target."""
        sequence = row.sequence
        target_s = sequence.group.request.tpot_target_s
        if target_s is None or sequence.is_beam or sequence.group.best_of is not None:
            return None
        if sequence.pace_start is None:
            # Its first token is under way.
            return pace_of(sequence.priority, target_s, starts_s, 1)
        start_s, num_known = sequence.pace_start
        num_tokens = sequence.num_expected - num_known - len(row.draft_token_ids)
        return pace_of(sequence.priority, target_s, start_s, num_tokens)

    def _sharers(self, prefills: list[Sequence]) -> set[Account]:
        """Whose prompts are computed, or wait with a slot left for them."""
        accounts = {each.account for each in prefills}
        if len(self._state.running) < self._config.max_num_seqs:
            accounts |= self._state.line.accounts
        return accounts

    def _expected_s(self, draft: PlanDraft) -> float:
        """How long the step takes."""
        speed = self._state.speed
        chunk = sum(row.work for row in draft.rows.values() if row.is_prefill)
        if not chunk:
            return speed.time.last_decode_s
        decodes = [row for row in draft.rows.values() if not row.is_prefill]
        work = sum(speed.work(row.start, row.num_tokens) for row in decodes)
        return speed.time.decode_s(work) + speed.time.chunk_s(chunk)

    def _seal(self, draft: PlanDraft, starts_s: float) -> SchedulerOutput:
        state = self._state
        ends_s = starts_s + self._expected_s(draft)
        if any(row.is_prefill for row in draft.rows.values()):
            self._prompts_since_s = ends_s
        copies, offloads, restores = state.cache.drain_transfers()
        state.totals.offloaded_blocks += len(offloads)
        copied = {parent for parent, _ in draft.forks}
        plan = SchedulerOutput(
            step_id=draft.step_id,
            new_sequences=tuple(draft.new.values()),
            scheduled=tuple(
                ScheduledSequence(
                    sequence_id,
                    row.start,
                    row.num_tokens,
                    draft.new_blocks.get(sequence_id, ()),
                    row.samples,
                    row.draft_token_ids,
                    row.num_given_up,
                )
                for sequence_id, row in draft.rows.items()
            ),
            released=(*state.released, *(each for each in state.outlived if each not in copied)),
            block_copies=copies,
            offloads=offloads,
            restores=restores,
            forks=tuple(draft.forks),
        )
        for sequence in draft.computed_prompts:
            state.release_held(sequence.group, draft.now)
        if plan.scheduled or plan.released:
            # The runner drops states before it copies them, so copied ones go with the next plan.
            state.released = [each for each in state.outlived if each in copied]
            state.outlived.clear()
            state.in_flight.append(StepInFlight(draft.step_id, draft.now, draft.rows, draft.num_possible, ends_s))
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
        remaining = sequence.num_expected - sequence.num_computed
        capacity = sequence.max_tokens_total - sequence.num_expected - 1
        drafts = sequence.draft_token_ids[: max(0, min(capacity, budget - remaining))]
        if remaining > budget:
            drafts = ()
        start = sequence.num_computed
        num_tokens = min(remaining, max(1, budget))
        if drafts and not self._fits(sequence, start, start + num_tokens + len(drafts)):
            drafts = ()
        num_tokens += len(drafts)
        while not self._fits(sequence, start, start + num_tokens):
            victim = self._lowest_below(draft, sequence)
            self._state.preempt(victim, "kv_pressure", draft.now)
            draft.preempted_for_blocks = True
            if victim is sequence:
                return
        self._rows.add(draft, sequence, num_tokens, drafts)

    def _fits(self, sequence: Sequence, start: int, end: int) -> bool:
        needed = self._state.cache.num_new_blocks(sequence.table, start, end)
        return not needed or needed <= self._state.promises.num_free(besides=sequence)

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
                None if draft.preempted_for_blocks else self._admitter.candidate(draft, skipped, allowed)
            )
            if chunk is not None and (candidate is None or chunk.priority >= candidate.priority):
                self._rows.add_chunk(draft, chunk)
                chunk = next(running, None)
            elif candidate is None or not self._admitter.admit_or_skip(draft, candidate, skipped):
                break
        while chunk is not None and draft.has_capacity:
            self._rows.add_chunk(draft, chunk)
            chunk = next(running, None)
