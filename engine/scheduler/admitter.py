"""Who is taken into the batch: candidates in the order of the line, slots and blocks by rank."""

from __future__ import annotations

import math
from collections.abc import Iterator

from engine.kv import Prefix, state_name
from engine.scheduler.plan_draft import PlanDraft, RowWriter
from engine.scheduler.sequence import Sequence, Status
from engine.scheduler.state import SchedulerState

# Waiting sequences that one plan looks behind: for a short prompt, for one that shares nothing.
_MAX_SKIPPED = 32
# Of prompts that are computed in one step, those that one plan passes over for shorter ones: what is left of
# a step is worth no more looking, and they come first in the next.
_MAX_UNFIT = 4
# And as many more for sequences whose adapters are not there: they hold up nobody.
_MAX_COLD = 256


class Admitter:
    """Admits waiting sequences into a plan, displacing lower tiers, and tenants that hold more."""

    def __init__(self, state: SchedulerState, rows: RowWriter) -> None:
        self._state = state
        self._rows = rows
        self._config = state.config
        # Why the last candidate could not be admitted, and when that was found. All that were behind it then
        # wait for the same cause, because the queue is admitted in order.
        self._blocked_by, self._blocked_at_s = "", -math.inf

    def candidate(
        self, draft: PlanDraft, skipped: set[int], allowed: frozenset[int] | None
    ) -> Sequence | None:
        """The next to admit; `allowed` restricts the choice while a failure is isolated."""
        if allowed is None:
            if len(skipped) > _MAX_SKIPPED + min(draft.num_cold, _MAX_COLD) or draft.num_unfit > _MAX_UNFIT:
                return None
            # Blocks are kept for it already, and its siblings hold theirs until it is back.
            promised = self._state.promises.waiting_beam(skipped)
            if promised is not None:
                return promised
            first = self._state.line.first(draft.now, skipped, with_due=not draft.due_blocked)
            return None if first is None else self._state.waiting[first]
        members = [
            sequence
            for sequence_id, sequence in self._state.waiting.items()
            if sequence_id in allowed and sequence_id not in skipped
        ]
        return min(members, key=lambda each: each.rank, default=None)

    def admit_or_skip(self, draft: PlanDraft, sequence: Sequence, skipped: set[int]) -> bool:
        """Admits the candidate, or passes over it; False when nobody behind it may be admitted either."""
        state = self._state
        if (
            # Displaced a moment ago while a step runs that samples its next token.
            sequence.num_pending or self._waits_for_prefix(draft, sequence) or self._lacks(draft, sequence)
        ):
            skipped.add(sequence.sequence_id)
            return True
        is_full = len(state.running) >= self._config.max_num_seqs
        victim = next(self._victims(draft, sequence), None) if is_full else None
        if is_full and victim is None:
            self._block(draft, sequence, self._who_fills_the_batch(sequence))
            is_aged = state.line.is_aged_next(sequence.sequence_id, draft.now)
            if is_aged or state.promises.has(sequence):
                # Waits for the next free slot without keeping higher tiers from displacing.
                skipped.add(sequence.sequence_id)
                return True
            return self._yields_as_due(draft, sequence)
        start, prefix = self._starting_point(draft, sequence)
        if self._rows.allowance(draft, sequence, sequence.num_known - start) < 1.0:
            self._waited_behind_the_head(sequence)
            # One that is computed in one step gets neither slot nor blocks before there is a step for it.
            draft.num_unfit += state.whole_prompts
            sequence.waits_for("batch_full" if state.whole_prompts else "long_prefill", draft.now)
            skipped.add(sequence.sequence_id)
            return True
        if victim is not None:
            self._displace(draft, victim, sequence)
            start, prefix = self._starting_point(draft, sequence)
        if not self._has_blocks(sequence, prefix):
            displaced = self._displace_for_blocks(draft, sequence, prefix)
            # Displacing changed what is referenced.
            start, prefix = self._starting_point(draft, sequence)
            if not displaced or not self._has_blocks(sequence, prefix):
                self._block(draft, sequence, "kv_pressure")
                return self._yields_as_due(draft, sequence)
        self._admit(draft, sequence, start, prefix)
        return True

    def _yields_as_due(self, draft: PlanDraft, sequence: Sequence) -> bool:
        """Whether the candidate came first because it is due; then the ordinary order goes on without it."""
        if draft.due_blocked or not self._state.line.is_due(sequence.sequence_id, draft.now):
            return False
        draft.due_blocked = True
        return True

    def _waits_for_prefix(self, draft: PlanDraft, sequence: Sequence) -> bool:
        """Whether others are computing so much of the prompt that taking it from them is the shorter way."""
        if draft.under_way is None or draft.under_way.is_empty or sequence.is_beam:
            return False
        if not draft.under_way.goes_on(sequence):
            start, prefix = self._starting_point(draft, sequence)
            if prefix is None or sequence.needs_every_position:
                return False
            sequence.awaited = draft.under_way.awaited(sequence, start)
            if sequence.awaited is None:
                return False
            if self._state.cache.has_states:
                sequence.awaited.owner.table.copy_at.add(sequence.awaited.end)
        # Nobody delays it: computing the tokens would take as long.
        sequence.waits_for("", draft.now)
        return True

    def _lacks(self, draft: PlanDraft, sequence: Sequence) -> bool:
        """Whether something that the sequence needs is not there yet. It holds up nobody."""
        for need in sequence.needs:
            cause = need.lacks(draft, sequence)
            if cause:
                self._state.awaits(need)
                sequence.waits_for(cause, draft.now)
                draft.num_cold += 1
                return True
        return False

    def num_to_spare(self, sequence: Sequence) -> int:
        """Blocks that may be set apart for the sequence while it has no slot."""
        return self._state.promises.num_free() - self._watermark(sequence, self._state.cache.num_present)

    def _starting_point(self, draft: PlanDraft, sequence: Sequence) -> tuple[int, Prefix | None]:
        """First position to compute, with the cached prefix; None instead of it when a parent is shared."""
        if self.can_fork(draft, sequence):
            # The last prompt token is computed again, for its logits.
            return sequence.num_prompt_tokens - 1, None
        if sequence.needs_every_position:
            return 0, Prefix()
        sequence.hasher.extend(sequence.token_ids, sequence.num_known)
        prefix = self._state.prefixes.cached(sequence)
        return prefix.num_blocks * self._state.cache.block_size, prefix

    def _want_copies(self, sequence: Sequence, prefix: Prefix) -> None:
        """Where the sequence's state, if it has one, is wanted by others: where the same prompt would begin,
        and where prompts part that began alike, which shows when more of this one is cached than can be used.
        """
        cache = self._state.cache
        if not cache.has_states:
            return
        size = cache.block_size
        sequence.table.copy_at.add((sequence.num_known - 1) // size * size)
        if prefix.num_matched > prefix.num_blocks:
            sequence.table.copy_at.add(prefix.num_matched * size)

    def _waited_behind_the_head(self, sequence: Sequence) -> None:
        """What kept the first of the queue kept everybody who was behind it and had no cause of its own. Who
        came later has waited for the step under way, which nobody is to blame for.
        """
        if not sequence.waiting_for and sequence.waiting_since_s <= self._blocked_at_s:
            sequence.waiting_for = self._blocked_by

    def _block(self, draft: PlanDraft, sequence: Sequence, cause: str) -> None:
        sequence.waits_for(cause, draft.now)
        self._blocked_by, self._blocked_at_s = cause, draft.now
        draft.someone_blocked = True

    def _who_fills_the_batch(self, sequence: Sequence) -> str:
        higher = all(running.priority > sequence.priority for running in self._state.running)
        return "higher_tier" if higher else "batch_full"

    def can_fork(self, draft: PlanDraft, sequence: Sequence) -> bool:
        """Whether an earlier plan has computed the prompt in blocks that the parent still holds."""
        parent = sequence.fork_parent
        # A state stands behind the last prompt token, which is to be computed again.
        if (
            parent is None
            or self._state.cache.has_states
            or self._state.full_blocks_alone
            # More than its last token is to be computed again, to choose by.
            or (sequence.kept is not None and sequence.kept.num_fresh)
            or parent.status is not Status.RUNNING
            # It has left the prompt.
            or parent.left_token_ids
            or sequence.took.num_preemptions
        ):
            return False
        row = draft.rows.get(parent.sequence_id)
        computed_before = parent.num_computed if row is None else row.start
        behind = self._state.cache.num_behind_window(sequence.num_prompt_tokens - 1)
        if behind < max(parent.table.num_given_up, parent.table.window_start):
            return False
        return computed_before >= sequence.num_prompt_tokens

    def _blocks_needed(self, sequence: Sequence, prefix: Prefix | None) -> int:
        cache = self._state.cache
        if sequence.awaits_promise and sequence.is_beam:
            return self._state.promises.reserve_of_beams(sequence.group)
        kept = sequence.kept
        most = cache.blocks_for(sequence.num_at_once) + (0 if kept is None else kept.num_fresh)
        if sequence.awaits_promise:
            num_tokens = sequence.max_tokens_total - 1
            most = cache.blocks_for(num_tokens) if kept is None else kept.most_blocks(num_tokens)
        if prefix is None:
            # One copy of the block that holds the last prompt token.
            return 1 + max(0, most - cache.blocks_for(sequence.num_prompt_tokens))
        return most - len(prefix.device_blocks) + prefix.num_revived

    def _window_blocks_needed(self, sequence: Sequence, prefix: Prefix | None) -> int:
        """Those that it begins with, which others may come to need as well; and those in which it goes on."""
        cache = self._state.cache
        if not cache.has_window_blocks:
            return 0
        if sequence.awaits_promise and sequence.is_beam:
            return self._state.promises.window_reserve_of_beams(sequence.group)
        end = sequence.max_tokens_total - 1 if sequence.awaits_promise else sequence.num_known
        if prefix is None:
            assert sequence.fork_parent is not None, "no prefix is looked up only for forks"
            first = cache.blocks_for(sequence.num_prompt_tokens)
            # The block that holds the last prompt token is copied.
            shared, growth = first - sequence.fork_parent.table.window_start, 1
        else:
            first, growth = prefix.num_blocks, 0
            shared = first - cache.num_behind_window(first * cache.block_size)
        growth += max(0, cache.blocks_for(end) - first)
        return shared + min(growth, max(1, cache.most_window_blocks - shared))

    def _has_blocks(self, sequence: Sequence, prefix: Prefix | None) -> bool:
        if prefix is not None:
            self._state.cache.use(prefix)
        return self._state.promises.find_room(*self._needed(sequence, prefix), besides=sequence)

    def _needed(self, sequence: Sequence, prefix: Prefix | None) -> tuple[int, int]:
        """Blocks and window blocks that must be there to admit it, those included that others grow by."""
        cache = self._state.cache
        needed = self._blocks_needed(sequence, prefix) + self._watermark(sequence, cache.num_present)
        in_windows = self._window_blocks_needed(sequence, prefix)
        if in_windows:
            in_windows += self._watermark(sequence, cache.num_present_window_blocks)
        return needed, in_windows

    def _watermark(self, sequence: Sequence, num_blocks: int) -> int:
        """Of so many blocks, those left free for those who run. A beam's own siblings do not count: they wait
        for it.
        """
        running = self._state.running
        num_others = len(running)
        if sequence.is_beam:
            num_others -= sum(each.group is sequence.group for each in running)
        if not num_others:
            return 0
        fraction = int(self._config.watermark * num_blocks)
        return max(fraction, len(running) + 1)

    # Displacement by a higher tier, and by an equal tenant that holds less.

    def _victims(self, draft: PlanDraft, sequence: Sequence) -> Iterator[Sequence]:
        """Who makes room for the sequence, the first to go first."""
        state, weight = self._state, sequence.group.request.weight
        return state.shares.victims(sequence.account, weight, state.running, draft.may_displace)

    def displace_beams(self, draft: PlanDraft) -> None:
        """Makes room where the next candidate would take a beam's slot: before the beams are planned, since
        those of one step are new sequences in the plan of the next.
        """
        if len(self._state.running) < self._config.max_num_seqs or not self._state.searches:
            return
        sequence = self.candidate(draft, set(), None)
        if sequence is None or sequence.num_pending or self._waits_for_prefix(draft, sequence):
            return
        if not self._state.admits_adapter(sequence):
            return
        victim = next(self._victims(draft, sequence), None)
        if victim is not None and victim.is_beam:
            self._displace(draft, victim, sequence)

    def _displace_for_blocks(self, draft: PlanDraft, sequence: Sequence, prefix: Prefix | None) -> bool:
        victims, promises = list(self._victims(draft, sequence)), self._state.promises
        free = promises.num_free(besides=sequence) + sum(victim.table.num_held for victim in victims)
        free_windows = promises.num_free_window_blocks(besides=sequence)
        free_windows += sum(victim.table.num_in_window for victim in victims)
        if not self._state.cache.covers((free, free_windows), self._needed(sequence, prefix)):
            return False
        for victim in victims:
            self._displace(draft, victim, sequence)
            if self._has_blocks(sequence, prefix):
                break
        return True

    def _displace(self, draft: PlanDraft, victim: Sequence, sequence: Sequence) -> None:
        draft.drop(victim)
        shares = victim.priority == sequence.priority
        self._state.preempt(victim, "preemption", draft.now, shares=shares)

    def _admit(self, draft: PlanDraft, sequence: Sequence, start: int, prefix: Prefix | None) -> None:
        state, now = self._state, draft.now
        group = sequence.group
        state.admitted(sequence, now)
        if prefix is None:
            assert sequence.fork_parent is not None
            state.cache.share(sequence.table, sequence.fork_parent.table, sequence.num_prompt_tokens)
            draft.fork_parents.add(sequence.fork_parent.sequence_id)
        else:
            state.cache.adopt(sequence.table, prefix)
            if state.cache.disk is not None:
                behind = () if prefix.state_hash is None else (state_name(prefix.state_hash),)
                state.cache.disk.use((*sequence.hasher.hashes[: prefix.num_blocks], *behind))
            self._want_copies(sequence, prefix)
            totals = state.totals
            totals.prefix_queried_tokens += sequence.num_known
            totals.prefix_hit_tokens += len(prefix.device_blocks) * state.cache.block_size
            totals.restored_tokens += len(prefix.host_hashes) * state.cache.block_size
            totals.restored_blocks += len(prefix.host_hashes)
            if prefix.host_hashes:
                sequence.restoring = (now, len(prefix.host_hashes) * state.cache.block_size)
        sequence.fork_parent = sequence.awaited = None
        state.cache.prepare_write(sequence.table, start, max(start, sequence.num_at_once))
        state.cache.prepare_choice(sequence.table)
        state.held_back.books(sequence, now)
        self._waited_behind_the_head(sequence)
        sequence.stops_waiting(now, num_computed=start)
        sequence.num_computed = sequence.num_confirmed = start
        sequence.prefill_end = sequence.num_known
        if group.first_scheduled_s is None:
            group.first_scheduled_s = now
            group.cached_prompt_tokens = start
        if not sequence.took.num_preemptions:
            sequence.high_water = max(sequence.high_water, start)
        state.start_running(sequence)
        if draft.under_way is not None:
            draft.under_way.add(sequence)
        self._rows.add_chunk(draft, sequence)
