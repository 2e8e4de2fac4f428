"""Builds one step's plan: decodes first, then prefill chunks and admissions by rank, under one token budget.

A sequence is planned by positions alone, so prefill chunks, decodes, prefix hits, resumed sequences, forced
tokens and drafts to verify are the same rule: compute [num_computed, num_computed + n).

Blocks: admission allocates the whole known prompt and leaves a watermark of at least one block per running
sequence. Only decoding takes blocks later, one sequence after the other by rank, and a sequence that finds
none takes those of the lowest-ranked sequence below it, or gives up its own. A sequence that was preempted
`max_preemptions` times comes back only when all blocks that it can still need are free, and these stay
promised to it: so the number of preemptions is bounded, and whoever is left can always go on.
"""

from __future__ import annotations

import msgspec

from engine.kv import Prefix
from engine.scheduler.queue import account_of
from engine.scheduler.sequence import Sequence, Status
from engine.scheduler.state import Row, SchedulerState, StepInFlight
from engine.types import NewSequence, SamplingParams, ScheduledSequence, SchedulerOutput

# Waiting long prompts that one plan looks behind for a short one.
_MAX_SKIPPED = 32


class PlanDraft:
    """The plan under construction."""

    def __init__(self, *, step_id: int, now: float, budget: int, long_budget: int) -> None:
        self.step_id = step_id
        self.now = now
        self.budget = budget
        self.long_budget = long_budget
        self.rows: dict[int, Row] = {}
        self.new: dict[int, NewSequence] = {}
        self.new_blocks: dict[int, tuple[int, ...]] = {}
        # Their blocks are read by this plan's copies.
        self.fork_parents: set[int] = set()
        # Their further choices may start with the next plan: copies come before the forward.
        self.computed_prompts: list[Sequence] = []
        self.preempted_for_blocks = False

    def add(self, row: Row) -> None:
        """Takes the row's tokens out of the budget."""
        self.rows[row.sequence.sequence_id] = row
        self.budget -= row.num_tokens
        if row.is_long:
            self.long_budget -= row.num_tokens

    def drop(self, sequence: Sequence) -> None:
        """Takes out the row of a running sequence that is displaced after all."""
        row = self.rows.pop(sequence.sequence_id, None)
        if row is not None:
            self.new_blocks.pop(sequence.sequence_id, None)
            self.budget += row.num_tokens
            if row.is_long:
                self.long_budget += row.num_tokens
            if row.samples:
                sequence.num_pending -= 1

    def may_displace(self, victim: Sequence) -> bool:
        """Whether the sequence can still be taken out of this plan."""
        return (
            not victim.boosted
            and victim.sequence_id not in self.new
            and victim.sequence_id not in self.fork_parents
        )


class Planner:
    """Makes plans from the state. `allowed` restricts a plan to some sequences, to isolate a failure."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._config = state.config
        self._next_step_id = 1
        # What held up the last candidate that could not be admitted; everyone behind it waits for the same.
        self._blocked_by = ""

    def plan(self, now: float, allowed: frozenset[int] | None = None) -> SchedulerOutput:
        """The next step. Empty when nobody can compute anything and nothing needs to be released."""
        state = self._state
        state.cache.begin_step()
        budget = self._config.max_num_batched_tokens
        contended = len(state.running) + len(state.waiting) > 1
        long_budget = max(1, int(budget * self._config.long_prefill_share)) if contended else budget
        draft = PlanDraft(step_id=self._next_step_id, now=now, budget=budget, long_budget=long_budget)
        prefills = self._plan_decodes(draft, allowed)
        self._plan_prefills(draft, prefills, allowed)
        return self._seal(draft)

    def _seal(self, draft: PlanDraft) -> SchedulerOutput:
        state = self._state
        copies, offloads, restores = state.cache.take_transfers()
        state.totals.offloaded_blocks += len(offloads)
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
                )
                for sequence_id, row in draft.rows.items()
            ),
            released=tuple(state.released),
            block_copies=copies,
            offloads=offloads,
            restores=restores,
        )
        for sequence in draft.computed_prompts:
            state.release_held(sequence.group, draft.now)
        if plan.scheduled or plan.released:
            state.released.clear()
            state.in_flight.append(StepInFlight(draft.step_id, draft.now, draft.rows))
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
            if sequence.status is Status.RUNNING and self._has_next_token(sequence):
                # Everyone behind gets at least one token; drafts share what is left.
                self._plan_decode(draft, sequence, draft.budget - (len(decodes) - position - 1))
        return [sequence for sequence in prefills if sequence.status is Status.RUNNING]

    @staticmethod
    def _has_next_token(sequence: Sequence) -> bool:
        if sequence.drafts_in_flight or sequence.num_expected >= sequence.max_tokens_total:
            return False
        if sequence.is_beam and sequence.num_pending:
            # What follows depends on the other beams as well.
            return False
        return sequence.num_expected > sequence.num_computed

    def _plan_decode(self, draft: PlanDraft, sequence: Sequence, budget: int) -> None:
        remaining = sequence.num_expected - sequence.num_computed
        room = sequence.max_tokens_total - sequence.num_expected - 1
        drafts = sequence.draft_token_ids[: max(0, min(room, budget - remaining))]
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
        self._add_row(draft, sequence, num_tokens, drafts)

    def _fits(self, sequence: Sequence, start: int, end: int) -> bool:
        state = self._state
        needed = state.cache.num_new_blocks(sequence.table, start, end)
        return needed <= state.cache.num_available - state.num_reserved_blocks(besides=sequence)

    def _lowest_below(self, draft: PlanDraft, sequence: Sequence) -> Sequence:
        for victim in reversed(self._state.running):
            if victim is sequence:
                break
            if not victim.boosted and victim.sequence_id not in draft.rows:
                return victim
        assert not sequence.holds_reservation, "a promised block is missing"
        return sequence

    # Prefill chunks and admissions.

    def _plan_prefills(
        self, draft: PlanDraft, prefills: list[Sequence], allowed: frozenset[int] | None
    ) -> None:
        """Running prefills and waiting sequences, merged by tier; inside a tier who runs goes first."""
        skipped: set[int] = set()
        running = iter(prefills)
        chunk = next(running, None)
        while draft.budget > 0:
            # New work is not taken in while running work is short of blocks.
            candidate = None if draft.preempted_for_blocks else self._candidate(draft, skipped, allowed)
            if chunk is not None and (candidate is None or chunk.priority >= candidate.priority):
                self._plan_chunk(draft, chunk)
                chunk = next(running, None)
            elif candidate is None or not self._admit_or_skip(draft, candidate, skipped):
                break
        while chunk is not None and draft.budget > 0:
            self._plan_chunk(draft, chunk)
            chunk = next(running, None)

    def _candidate(
        self, draft: PlanDraft, skipped: set[int], allowed: frozenset[int] | None
    ) -> Sequence | None:
        if allowed is None:
            return None if len(skipped) > _MAX_SKIPPED else self._state.waiting.peek(draft.now, skipped)
        members = [
            sequence
            for sequence in self._state.waiting
            if sequence.sequence_id in allowed and sequence.sequence_id not in skipped
        ]
        return min(members, key=lambda each: each.rank, default=None)

    def _plan_chunk(self, draft: PlanDraft, sequence: Sequence) -> None:
        if sequence.status is not Status.RUNNING:
            return
        num_tokens = min(sequence.remaining_prefill, draft.budget)
        if self._is_long(sequence.remaining_prefill):
            num_tokens = min(num_tokens, draft.long_budget)
        if num_tokens > 0:
            self._add_row(draft, sequence, num_tokens, ())

    def _is_long(self, num_tokens: int) -> bool:
        return num_tokens > self._config.long_prefill_tokens

    def _admit_or_skip(self, draft: PlanDraft, sequence: Sequence, skipped: set[int]) -> bool:
        """Admits the candidate, or passes over it; False when nobody behind it may be admitted either."""
        state = self._state
        if sequence.num_pending:
            # Displaced a moment ago while a step runs that samples its next token.
            skipped.add(sequence.sequence_id)
            return True
        if len(state.running) >= self._config.max_num_seqs and not self._displace_one(draft, sequence):
            self._block(draft, sequence, self._who_fills_the_batch(sequence))
            if state.waiting.is_aged_turn(sequence, draft.now):
                # Waits for the next free slot without keeping higher tiers from displacing.
                skipped.add(sequence.sequence_id)
                return True
            return False
        start, prefix = self._starting_point(draft, sequence)
        if self._is_long(sequence.num_known - start) and draft.long_budget <= 0:
            sequence.waits_for("long_prefill", draft.now)
            skipped.add(sequence.sequence_id)
            return True
        if not self._has_blocks(sequence, prefix):
            displaced = self._displace_for_blocks(draft, sequence, prefix)
            # Displacing changed what is referenced.
            start, prefix = self._starting_point(draft, sequence)
            if not displaced or not self._has_blocks(sequence, prefix):
                self._block(draft, sequence, "kv_pressure")
                return False
        self._admit(draft, sequence, start, prefix)
        return True

    def _starting_point(self, draft: PlanDraft, sequence: Sequence) -> tuple[int, Prefix | None]:
        """First position to compute, with the cached prefix; None instead of it when a parent is shared."""
        if self._can_fork(draft, sequence):
            # The last prompt token is computed again, for its logits.
            return sequence.num_prompt_tokens - 1, None
        cache = self._state.cache
        if sequence.sampling.prompt_logprobs is not None and sequence.first_token_s is None:
            # Cached positions have no logits to report.
            return 0, Prefix()
        sequence.hasher.extend(sequence.token_ids, sequence.num_known)
        prefix = cache.find_prefix(
            sequence.hasher, sequence.num_known, restore_worth_it=self._state.is_restoring_cheaper
        )
        return prefix.num_blocks * cache.block_size, prefix

    def _block(self, draft: PlanDraft, sequence: Sequence, cause: str) -> None:
        sequence.waits_for(cause, draft.now)
        self._blocked_by = cause

    def _who_fills_the_batch(self, sequence: Sequence) -> str:
        higher = all(running.priority > sequence.priority for running in self._state.running)
        return "higher_tier" if higher else "batch_full"

    @staticmethod
    def _can_fork(draft: PlanDraft, sequence: Sequence) -> bool:
        """Whether an earlier plan has computed the prompt in blocks that the parent still holds."""
        parent = sequence.fork_parent
        if parent is None or parent.status is not Status.RUNNING or sequence.num_preemptions:
            return False
        row = draft.rows.get(parent.sequence_id)
        computed_before = parent.num_computed if row is None else row.start
        return computed_before >= sequence.num_prompt_tokens

    def _blocks_needed(self, sequence: Sequence, prefix: Prefix | None) -> int:
        cache = self._state.cache
        end = sequence.max_tokens_total - 1 if sequence.holds_reservation else sequence.num_known
        if prefix is None:
            # One copy of the block that holds the last prompt token.
            shared = cache.blocks_for(sequence.num_prompt_tokens)
            return 1 + max(0, cache.blocks_for(end) - shared)
        return cache.blocks_for(end) - len(prefix.device_blocks) + prefix.num_revived

    def _has_blocks(self, sequence: Sequence, prefix: Prefix | None) -> bool:
        state = self._state
        free = state.cache.num_available - state.num_reserved_blocks()
        return self._blocks_needed(sequence, prefix) + self._watermark() <= free

    def _watermark(self) -> int:
        if not self._state.running:
            return 0
        fraction = int(self._config.watermark * self._state.cache.num_blocks)
        return max(fraction, len(self._state.running) + 1)

    # Displacement by a higher tier.

    def _displace_one(self, draft: PlanDraft, sequence: Sequence) -> bool:
        for victim in reversed(self._state.running):
            if victim.priority < sequence.priority and draft.may_displace(victim):
                self._displace(draft, victim)
                return True
        return False

    def _displace_for_blocks(self, draft: PlanDraft, sequence: Sequence, prefix: Prefix | None) -> bool:
        victims = [
            victim
            for victim in reversed(self._state.running)
            if victim.priority < sequence.priority and draft.may_displace(victim)
        ]
        state = self._state
        needed = self._blocks_needed(sequence, prefix) + self._watermark()
        available = state.cache.num_available - state.num_reserved_blocks()
        if available + sum(len(victim.table) for victim in victims) < needed:
            return False
        for victim in victims:
            self._displace(draft, victim)
            if self._has_blocks(sequence, prefix):
                break
        return True

    def _displace(self, draft: PlanDraft, victim: Sequence) -> None:
        draft.drop(victim)
        self._state.preempt(victim, "preemption", draft.now)

    # Rows.

    def _admit(self, draft: PlanDraft, sequence: Sequence, start: int, prefix: Prefix | None) -> None:
        state, now = self._state, draft.now
        group = sequence.group
        state.waiting.admitted(sequence, now)
        state.pace.admitted(
            sequence.priority, now, backlog=state.waiting.num_at_or_above(sequence.priority) > 0
        )
        if prefix is None:
            assert sequence.fork_parent is not None
            state.cache.share(sequence.table, sequence.fork_parent.table, sequence.num_prompt_tokens)
            draft.fork_parents.add(sequence.fork_parent.sequence_id)
        else:
            state.cache.adopt(sequence.table, prefix)
            totals = state.totals
            totals.prefix_queried_tokens += sequence.num_known
            totals.prefix_hit_tokens += len(prefix.device_blocks) * state.cache.block_size
            totals.restored_tokens += len(prefix.host_hashes) * state.cache.block_size
            totals.restored_blocks += len(prefix.host_hashes)
        sequence.fork_parent = None
        state.cache.prepare_write(sequence.table, start, sequence.num_known)
        if not sequence.waiting_for:
            sequence.waiting_for = self._blocked_by
        sequence.stops_waiting(now)
        sequence.num_computed = sequence.num_confirmed = start
        sequence.prefill_end = sequence.num_known
        if group.first_scheduled_s is None:
            group.first_scheduled_s = now
            group.cached_prompt_tokens = start
        if not sequence.num_preemptions:
            sequence.high_water = max(sequence.high_water, start)
        state.start_running(sequence)
        num_tokens = min(sequence.remaining_prefill, draft.budget)
        if self._is_long(sequence.remaining_prefill):
            num_tokens = min(num_tokens, draft.long_budget)
        self._add_row(draft, sequence, num_tokens, ())

    def _introduction(self, sequence: Sequence, block_ids: tuple[int, ...]) -> NewSequence:
        request = sequence.group.request
        return NewSequence(
            sequence.sequence_id,
            tuple(sequence.token_ids),
            sequence.num_prompt_tokens,
            self._sampling_of(sequence),
            sequence.choice_index,
            request.grammar,
            request.adapter,
            block_ids,
        )

    @staticmethod
    def _sampling_of(sequence: Sequence) -> SamplingParams:
        if sequence.sampling.prompt_logprobs is not None and sequence.first_token_s is not None:
            # Reported before the preemption already.
            return msgspec.structs.replace(sequence.sampling, prompt_logprobs=None)
        return sequence.sampling

    def _add_row(
        self, draft: PlanDraft, sequence: Sequence, num_tokens: int, drafts: tuple[int, ...]
    ) -> None:
        state = self._state
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        remaining_prefill = sequence.remaining_prefill
        state.cache.prepare_write(sequence.table, start, end)
        blocks = sequence.table.take_unsent()
        if not sequence.is_introduced:
            draft.new[sequence.sequence_id] = self._introduction(sequence, blocks)
            sequence.is_introduced = True
        elif blocks:
            draft.new_blocks[sequence.sequence_id] = blocks
        samples = end >= sequence.num_expected
        fresh = max(0, end - max(start, sequence.high_water))
        row = Row(
            sequence=sequence,
            epoch=sequence.epoch,
            start=start,
            num_tokens=num_tokens,
            samples=samples,
            draft_token_ids=drafts,
            is_prefill=remaining_prefill > 0,
            is_long=self._is_long(remaining_prefill),
            num_fresh=fresh,
        )
        if row.is_prefill:
            sequence.recomputed_tokens += num_tokens - fresh
            state.totals.recomputed_tokens += num_tokens - fresh
            state.totals.computed_prompt_tokens += fresh
            weight = sequence.group.request.weight
            state.counters.charge(account_of(sequence), weight, fresh, 0)
        sequence.num_computed = end
        sequence.high_water = max(sequence.high_water, end)
        sequence.num_pending += samples
        sequence.drafts_in_flight = bool(drafts)
        sequence.draft_token_ids = ()
        draft.add(row)
        if row.is_prefill and end >= sequence.num_prompt_tokens:
            draft.computed_prompts.append(sequence)
