"""Whose the seconds of a step are: each sequence has the part of its work, and all are counted once.

A step computes rows for nobody now and then: with overlap, of a sequence whose end was not known yet. That is
a price of computing together: the others of the step bear it, or those of the next where it has no others.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.policy.pace import StepPace
from engine.scheduler.sequence import Status
from engine.scheduler.state import Row, StepInFlight
from engine.types import SequenceResult


class StepCosts:
    """Books what steps took on the requests that they computed."""

    def __init__(self, speed: StepPace) -> None:
        # What a token is worth where it looks back on many.
        self._speed = speed
        # Of steps that computed for nobody; the next one's requests bear it.
        self._owed_s = 0.0

    def book(self, step: StepInFlight, results: Mapping[int, SequenceResult], seconds: float) -> None:
        """A step that came back, with what it means for its sequences."""
        for row, seconds_of_token in self._shares(step, seconds):
            spent, num_tokens = row.sequence.group.engine_time, row.num_tokens
            if row.is_prefill:
                spent.prefill_s += (num_tokens - row.num_recomputed) * seconds_of_token
                spent.recompute_s += row.num_recomputed * seconds_of_token
                continue
            if row.draft_token_ids:
                result = results.get(row.sequence.sequence_id)
                num_wasted = len(row.draft_token_ids) - (0 if result is None else result.num_accepted)
                spent.speculative_waste_s += num_wasted * seconds_of_token
                num_tokens -= num_wasted
            spent.decode_s += num_tokens * seconds_of_token

    def book_lost(self, step: StepInFlight, seconds: float) -> None:
        """A step that failed, or came back after one that did: all of it is computed again."""
        for row, seconds_of_token in self._shares(step, seconds):
            row.sequence.group.engine_time.recompute_s += row.num_tokens * seconds_of_token

    def _shares(self, step: StepInFlight, seconds: float) -> list[tuple[Row, float]]:
        """Rows of requests that have not ended, each with the seconds that one of its tokens bears."""
        if not step.rows:
            # Only releases; no step that is counted.
            return []
        rows = [row for row in step.rows.values() if row.sequence.status is not Status.FINISHED]
        works = [self._speed.work(row.start, row.num_tokens) for row in rows]
        owed_s, self._owed_s = self._owed_s + seconds, 0.0
        if not rows:
            self._owed_s = owed_s
            return []
        per_work_s = owed_s / sum(works)
        return [(row, per_work_s * work / row.num_tokens) for row, work in zip(rows, works, strict=True)]
