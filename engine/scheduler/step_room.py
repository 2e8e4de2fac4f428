"""How much of prompts the next step may hold: gathers what `policy.pace` decides from."""

from __future__ import annotations

import math
from collections import Counter

from engine.policy.pace import Answers, Pace, PromptsLeft, StepLimits, chunk_work, pace_of
from engine.policy.rates import LEAST_CHUNK_TOKENS
from engine.policy.shares import Account
from engine.scheduler.plan_draft import PlanDraft
from engine.scheduler.sequence import Sequence
from engine.scheduler.state import Row, SchedulerState


class StepRoom:
    """Asked once for each plan with prompts, after its answers are in and before any prompt is."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        # Since when prompts that could be computed were not; None while there are none.
        self._prompts_since_s: float | None = None
        config = state.config
        longest_s, neighbours_s = config.step_target_ms / 1000, config.neighbour_step_ms / 1000
        self._limits = StepLimits(longest_s, neighbours_s if longest_s else 0.0)

    def starts_s(self, now: float) -> float:
        """When a step that is planned now begins: after those in flight."""
        steps = self._state.in_flight
        if not steps:
            return now
        began_s = max(steps[0].planned_s, self._state.last_result_s)
        return max(now, began_s + sum(step.expected_s for step in steps))

    def nobody_waits(self, now: float) -> None:
        """There are no prompts to compute."""
        self._prompts_since_s = None
        self._state.held_back.plans((), now)

    def limits(self, draft: PlanDraft, prefills: list[Sequence], sharers: set[Account]) -> dict[int, float]:
        """Work of prompts that the step may hold, by the tier of who asks for it. `prefills` have a slot;
        `sharers` have prompts that can be computed.
        """
        state, rows, starts_s = self._state, draft.rows.values(), self.starts_s(draft.now)
        answers = Answers(
            num_rows=draft.whole_budget - draft.budget,
            work=sum(state.speed.work(row.start, row.num_tokens) for row in rows),
            paces=[pace for row in rows if (pace := _pace(row, starts_s)) is not None],
            starts_s=starts_s,
        )
        since_s = starts_s if self._prompts_since_s is None else self._prompts_since_s
        self._prompts_since_s = since_s if sharers else None
        # Who has to take a slot from somebody else is let in at once.
        waited_s = max(0.0, starts_s - since_s) if sharers else math.inf
        works, late = self._works(prefills), self._late_tiers(prefills, draft.now)
        unpaced = {row.sequence.account[1] for row in rows if _pace(row, starts_s) is None}
        limits, above, is_late = {}, 0, False
        held: set[int] = set()
        for priority in sorted(works, reverse=True):
            above += works[priority]
            is_late |= priority in late
            tenants = unpaced | {tenant for tier, tenant in sharers if tier >= priority}
            has_neighbours = len(tenants) > 1 or state.traffic.had_several(draft.now)
            prompts = PromptsLeft(priority, above, waited_s, is_late, has_neighbours)
            limits[priority] = chunk_work(state.speed.time, answers, prompts, self._limits)
            if above and not limits[priority]:
                held.add(priority)
        state.held_back.plans(held, draft.now)
        return limits

    def _works(self, prefills: list[Sequence]) -> Counter[int]:
        """Tokens of prompts that can be computed, by tier; every tier that waits is in it."""
        works = self._state.line.tokens_by_tier()
        if len(self._state.running) >= self._state.config.max_num_seqs:
            works = Counter(dict.fromkeys(works, 0 if prefills else LEAST_CHUNK_TOKENS))
        for sequence in prefills:
            works[sequence.priority] += sequence.remaining_prefill
        return works

    def _late_tiers(self, prefills: list[Sequence], now: float) -> set[int]:
        """Tiers with prompts that can no longer have their first tokens in time."""
        deadlines = ((each.priority, each.group.request.ttft_deadline_s) for each in prefills)
        started = {priority for priority, due_s in deadlines if due_s is not None and due_s < now}
        return started | self._state.line.late_tiers(now)

    def planned(self, draft: PlanDraft) -> float:
        """How long the step is expected to take. Prompts that are left wait from its end on."""
        speed = self._state.speed
        prompts = [row for row in draft.rows.values() if row.is_prefill]
        if not prompts:
            return speed.time.last_decode_s
        chunk = sum(row.work for row in prompts)
        rows = (row for row in draft.rows.values() if not row.is_prefill)
        decodes = sum(speed.work(row.start, row.num_tokens) for row in rows)
        expected_s = speed.time.decode_s(decodes) + speed.time.chunk_s(chunk)
        self._prompts_since_s = self.starts_s(draft.now) + expected_s
        return expected_s


def _pace(row: Row, starts_s: float) -> Pace | None:
    """What the row's answer is owed; None where it is not sent as it comes, or its tier has no target."""
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
