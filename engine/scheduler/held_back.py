"""For how long prompts were held back so that those who are answered keep their pace, told by their requests.

Used by `StepRoom`, which holds them back, and where a prompt's next chunk is planned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from engine.scheduler.sequence import Sequence, Status

# Value of `observability.emit.names.Cause`.
ANSWER_PACE = "answer_pace"


class HeldBack:
    """Seconds by tier, since the scheduler began. Time is an argument."""

    def __init__(self) -> None:
        self._past_s: defaultdict[int, float] = defaultdict(float)
        self._since_s: dict[int, float] = {}

    def plans(self, held: Collection[int], now: float) -> None:
        """A step is planned without any prompt of these tiers, though some could be computed."""
        for priority in [each for each in self._since_s if each not in held]:
            self._past_s[priority] += now - self._since_s.pop(priority)
        for priority in held:
            self._since_s.setdefault(priority, now)

    def begins(self, sequence: Sequence, now: float) -> None:
        """The sequence has something to compute from now on."""
        sequence.held_before_s = self._so_far_s(sequence.priority, now)

    def books(self, sequence: Sequence, now: float) -> None:
        """Something of the sequence is computed next: blames what it was held back for since the last time,
        unless it waited for something else meanwhile.
        """
        before_s, total_s = sequence.held_before_s, self._so_far_s(sequence.priority, now)
        sequence.held_before_s = total_s
        waits_for_more = sequence.status is not Status.RUNNING and sequence.waiting_for
        if before_s is None or waits_for_more or total_s <= before_s:
            return
        held_s = min(total_s - before_s, now - sequence.waiting_since_s)
        sequence.blames(ANSWER_PACE, held_s)
        # The rest of a wait in the queue has another cause.
        sequence.waiting_since_s += held_s

    def _so_far_s(self, priority: int, now: float) -> float:
        since_s = self._since_s.get(priority)
        return self._past_s[priority] + (0.0 if since_s is None else now - since_s)
