"""The plan under construction, and how a row gets into it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import msgspec

from engine.policy.rates import PromptWork
from engine.policy.shares import Account
from engine.scheduler.prefixes import BlocksUnderWay
from engine.scheduler.sequence import Sequence, Status
from engine.scheduler.state import Row, SchedulerState
from engine.types import NewSequence, SamplingParams, ScheduledSequence


@dataclass(eq=False)
class PlanDraft:
    """The plan under construction."""

    step_id: int
    now: float
    budget: int
    long_budget: int
    # Prompt blocks that somebody computes already; None where nobody may wait for them.
    under_way: BlocksUnderWay | None
    # Limits what prompts may add to the step, because answers wait for it.
    work: PromptWork = field(default_factory=PromptWork)
    rows: dict[int, Row] = field(default_factory=dict)
    new: dict[int, NewSequence] = field(default_factory=dict)
    new_blocks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    # (parent, child): beams whose runner state starts as a copy.
    forks: list[tuple[int, int]] = field(default_factory=list)
    # Their blocks are read by this plan's copies.
    fork_parents: set[int] = field(default_factory=set)
    # Their further choices may start with the next plan: copies come before the forward.
    computed_prompts: list[Sequence] = field(default_factory=list)
    preempted_for_blocks: bool = False
    # Somebody waits for a slot or for blocks, and not for the budget alone.
    someone_blocked: bool = False
    # A due request found no slot: until one comes free, higher tiers go on.
    due_blocked: bool = False
    # Sequences that were passed over because their adapters are not there, or what else holds up nobody.
    num_cold: int = 0
    # Prompts, each of which is computed in one step, that this one has no room for.
    num_unfit: int = 0
    # No room was left for the keys that a candidate will forget.
    lacks_forgotten_room: bool = False

    def __post_init__(self) -> None:
        self.whole_budget = self.budget

    @property
    def has_capacity(self) -> bool:
        """Whether prompts may still be added."""
        return self.budget > 0 and not self.work.is_used_up

    @property
    def num_possible(self) -> int:
        """Tokens that the step could have had."""
        return self.whole_budget - (0 if self.has_capacity else self.budget)

    def scheduled(self) -> tuple[ScheduledSequence, ...]:
        """The rows as the runner is told of them."""
        return tuple(
            ScheduledSequence(
                sequence_id,
                row.start,
                row.num_tokens,
                self.new_blocks.get(sequence_id, ()),
                row.samples,
                row.draft_token_ids,
                row.num_given_up,
                row.snapshots,
            )
            for sequence_id, row in self.rows.items()
        )

    def add(self, row: Row) -> None:
        """Takes the row's tokens out of the budget."""
        self.rows[row.sequence.sequence_id] = row
        self.budget -= row.num_tokens
        self._count_work(row, row.work)
        if row.is_long:
            self.long_budget -= row.num_tokens

    def _count_work(self, row: Row, work: float) -> None:
        if row.is_prefill:
            self.work.acquire(row.sequence.account, work, is_long=row.is_long)

    def limit(self, works: Mapping[int, float], long_share: float, sharers: Collection[Account]) -> None:
        """Lets prompts of each tier take no more than so much work, and so no more tokens, of the budget that
        is left, and those of one of the sharers no more than its part.
        """
        self.work = PromptWork(works, long_share, sharers)
        num_tokens = int(min(self.work.limit, self.budget))
        self.whole_budget -= self.budget - num_tokens
        self.budget = num_tokens
        self.long_budget = min(self.long_budget, max(1, int(num_tokens * long_share)))

    def drop(self, sequence: Sequence) -> None:
        """Takes out the row of a running sequence that is displaced after all."""
        row = self.rows.pop(sequence.sequence_id, None)
        if row is not None:
            self.new_blocks.pop(sequence.sequence_id, None)
            self.budget += row.num_tokens
            self._count_work(row, -row.work)
            if row.is_long:
                self.long_budget += row.num_tokens
            if row.samples:
                sequence.num_pending -= 1 + len(row.draft_token_ids)

    def may_displace(self, victim: Sequence) -> bool:
        """Whether the sequence can still be taken out of this plan."""
        return (
            not victim.boosted
            and victim.sequence_id not in self.new
            and victim.sequence_id not in self.fork_parents
        )


class RowWriter:
    """Adds rows to drafts and books what they compute."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._long_prefill_tokens = state.config.long_prefill_tokens
        self._block_size = state.cache.block_size
        self._state_interval = 0 if state.cache.states is None else state.cache.states.interval

    def is_long(self, num_tokens: int) -> bool:
        """Whether so many tokens left to compute make a prompt long."""
        return num_tokens > self._long_prefill_tokens

    def allowance(self, draft: PlanDraft, sequence: Sequence, num_tokens: int) -> float:
        """Work that the sequence may add to the step if it has so many tokens left to compute; less than 1
        where there is no room for it, or for all of it where it is computed in one step.
        """
        if self._state.whole_prompts and not self._fits_whole(draft, num_tokens):
            return 0.0
        is_long = self.is_long(num_tokens)
        if is_long and draft.long_budget <= 0:
            return 0.0
        return draft.work.allowance(sequence.account, is_long=is_long)

    @staticmethod
    def _fits_whole(draft: PlanDraft, num_tokens: int) -> bool:
        """Others of the step go first only where it has room for both."""
        return num_tokens <= draft.budget or not draft.rows

    def add_chunk(self, draft: PlanDraft, sequence: Sequence) -> None:
        """As much of the prompt as the budgets allow; nothing for one that lost its slot meanwhile."""
        if sequence.status is not Status.RUNNING:
            return
        if self._state.whole_prompts:
            if self._fits_whole(draft, sequence.remaining_prefill):
                self.add(draft, sequence, sequence.remaining_prefill, ())
            return
        num_tokens = min(sequence.remaining_prefill, draft.budget, self.window_room(sequence, draft.budget))
        start = sequence.num_computed
        num_tokens = sequence.end_of_row(start, start + num_tokens) - start
        if self.is_long(sequence.remaining_prefill):
            num_tokens = min(num_tokens, draft.long_budget)
        if draft.work.is_limited:
            work = self.allowance(draft, sequence, sequence.remaining_prefill)
            if work < math.inf:
                num_tokens = min(num_tokens, self._state.speed.tokens_for(work, sequence.num_computed))
        if num_tokens > 0:
            self._state.held_back.books(sequence, draft.now)
            self.add(draft, sequence, num_tokens, ())

    def window_room(self, sequence: Sequence, most: int) -> int:
        """Tokens of its prompt, of which `most` are asked for, for which the sequence finds window blocks, if
        it needs any.
        """
        state, table = self._state, sequence.table
        if not state.cache.has_window_blocks:
            return sequence.remaining_prefill
        end = sequence.num_computed + min(sequence.remaining_prefill, most)
        needed = state.cache.num_new_window_blocks(table, sequence.num_computed, end)
        if needed and state.promises.find_room(0, needed, besides=sequence):
            return sequence.remaining_prefill
        num_blocks = table.window_end + max(0, state.promises.num_free_window_blocks(besides=sequence))
        return max(0, num_blocks * self._block_size - sequence.num_computed)

    def add_next(self, draft: PlanDraft, sequence: Sequence) -> bool:
        """The next token of a sequence that decodes, where nothing else has to be thought of: it lies in a
        block that the runner knows of, which nobody can share until it is full. Most rows are of this kind.
        False, and nothing done, for others; `add` gives the same row.
        """
        start, table = sequence.num_computed, sequence.table
        num_expected = len(sequence.token_ids) + sequence.num_pending
        if (
            num_expected != start + 1
            or num_expected >= sequence.max_tokens_total
            or not start % self._block_size
            or (self._state_interval and not num_expected % self._state_interval)
            or not sequence.is_introduced
            or sequence.status is not Status.RUNNING
            or sequence.is_beam
            or sequence.draft_token_ids
            or table.draft_copies
            or len(table.block_ids) != table.num_sent
            or table.num_given_up != table.num_given_up_sent
            or draft.budget < 1
        ):
            return False
        draft.rows[sequence.sequence_id] = Row(sequence, sequence.epoch, start, 1, True)
        draft.budget -= 1
        sequence.num_computed = num_expected
        sequence.high_water = max(sequence.high_water, num_expected)
        sequence.num_pending += 1
        return True

    def _copies_of_state(
        self, sequence: Sequence, start: int, end: int, num_drafts: int
    ) -> tuple[tuple[int, int], ...]:
        """What a row of positions [start, end) leaves of the sequence's state, where it has one: behind each
        token that may turn out to be its last; at ends of blocks, if there are no drafts.
        """
        states, table = self._state.cache.states, sequence.table
        if states is None:
            return ()
        if not num_drafts:
            return states.leave(table, sequence.hasher, start, end)
        return states.leave_behind_drafts(table, end - num_drafts, num_drafts)

    def _introduction(self, sequence: Sequence, block_ids: tuple[int, ...]) -> NewSequence:
        request = sequence.group.request
        return NewSequence(
            sequence.sequence_id,
            tuple(sequence.token_ids),
            sequence.output_start,
            self._sampling_of(sequence),
            sequence.choice_index,
            request.grammar,
            request.adapter,
            block_ids,
            self._state.adapters.slot_of(request.adapter) if request.adapter else -1,
            request.thinking,
            request.pooling,
            sequence.table.state_slot,
            request.tenant,
            request.cache_salt,
            sequence.kept,
            tuple(sequence.table.fresh),
            tuple(sequence.left_token_ids),
        )

    @staticmethod
    def _sampling_of(sequence: Sequence) -> SamplingParams:
        is_told = sequence.first_token_s is not None or bool(sequence.left_token_ids)
        if sequence.sampling.prompt_logprobs is not None and is_told:
            # Reported before the preemption already, or by another engine.
            return msgspec.structs.replace(sequence.sampling, prompt_logprobs=None)
        return sequence.sampling

    def add(self, draft: PlanDraft, sequence: Sequence, num_tokens: int, drafts: tuple[int, ...]) -> None:
        """A row of the next `num_tokens` tokens, drafts included, with the blocks that it writes to."""
        state = self._state
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        remaining_prefill = sequence.remaining_prefill
        state.cache.prepare_write(sequence.table, start, end)
        state.cache.prepare_windows(sequence.table, end)
        blocks = sequence.table.drain_unsent()
        num_given_up = sequence.table.drain_given_up()
        if not sequence.is_introduced:
            draft.new[sequence.sequence_id] = self._introduction(sequence, blocks)
            if sequence.beam_parent_id in state.outlived:
                draft.forks.append((sequence.beam_parent_id, sequence.sequence_id))
            sequence.is_introduced = True
        elif blocks:
            draft.new_blocks[sequence.sequence_id] = blocks
        fresh = max(0, end - max(start, sequence.high_water))
        row = Row(
            sequence=sequence,
            epoch=sequence.epoch,
            start=start,
            num_tokens=num_tokens,
            samples=end >= sequence.num_expected,
            draft_token_ids=drafts,
            drafter=sequence.drafter,
            is_prefill=remaining_prefill > 0,
            is_long=self.is_long(remaining_prefill),
            num_recomputed=num_tokens - fresh,
            num_given_up=num_given_up,
            snapshots=self._copies_of_state(sequence, start, end, len(drafts)),
        )
        if row.is_prefill:
            row.work = state.speed.work(start, num_tokens)
            sequence.took.recomputed_tokens += num_tokens - fresh
            state.totals.recomputed_tokens += num_tokens - fresh
            state.totals.computed_prompt_tokens += fresh
            state.shares.charge(sequence.account, sequence.group.request.weight, fresh, 0)
        sequence.num_computed = end
        sequence.high_water = max(sequence.high_water, end)
        if row.samples:
            sequence.num_pending += 1 + len(drafts)
        sequence.draft_token_ids = ()
        draft.add(row)
        if row.is_prefill and end >= sequence.num_prompt_tokens:
            draft.computed_prompts.append(sequence)
