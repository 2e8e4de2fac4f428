"""How many lines may be under way.

Lines run in what capacity is left. Where nobody else asked lately they become more with each line that ends.
Beside others they become more as long as others' first tokens are as early as without lines: nine in ten of
those without lines did not exceed `late_s`; a first token beside lines that does takes a quarter of them, any
other adds a twentieth. So 13 in 100 are later than that in the long run, where 10 would be without lines.
Where a single line makes more of them late, it does not follow at once on the one before: half a line is one
that is under way half of the time. None begins while a first token of others is on its way.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

# Lines for each engine while others' requests run there, at most; as many as max_in_flight where none does.
_BESIDE_OTHERS = 0.25
# After the number of lines was halved nothing is done about it for so long: those under way end meanwhile.
_HOLD_S = 0.5
# Others ask as long as the last one came so lately: who reads an answer asks again within it.
_LATELY_S = 30.0
# Beside others lines are under way for at least so much of the time: a batch is not starved for ever. And one
# begins though first tokens of others are on their way, where none did for so long.
_LEAST_BESIDE, _HELD_S = 0.5, 1.0
# First tokens that tell what they take without lines: so many are kept, and fewer than that tell nothing.
_KEPT, _ENOUGH = 128, 8
# A first token beside lines is late if it takes more than this share of those without lines. If lines cost
# nothing, one in ten is late; the number of lines is steady where a few more are.
_USUAL, _LATE_BESIDE = 0.9, 0.15
# How fast the number of lines follows.
_GAIN = 0.3
# Where every first token had lines beside it for so long, no line begins until one had none, or for a second.
_KNOWN_S, _PAUSE_S = 10.0, 1.0


class WhatElse(NamedTuple):
    """What there is besides lines. Clocks and durations in seconds."""

    num_engines: int
    # Requests of others run on an engine now; one of them has no first token yet, and waits longer for it
    # than a share of its tier's target.
    others_run: bool = False
    others_begin: bool = False
    others_wait: bool = False
    # Further lines would only stand in front of an engine.
    queued: bool = False
    # When the last of others' requests came.
    asked_s: float | None = None


class FirstTokens:
    """What others' first tokens take while no line is under way."""

    def __init__(self) -> None:
        self._alone_s: deque[float] = deque(maxlen=_KEPT)
        self.known_s = float("-inf")

    def add(self, took_s: float, now_s: float) -> None:
        """One had no line beside it, from its request to the token."""
        self._alone_s.append(took_s)
        self.known_s = now_s

    @property
    def late_s(self) -> float | None:
        """What nine in ten of them did not exceed; None while too few are known."""
        if len(self._alone_s) < _ENOUGH:
            return None
        return sorted(self._alone_s)[int(_USUAL * (len(self._alone_s) - 1))]


class LineWindow:
    """Lines that may be under way at a time."""

    def __init__(self, max_per_engine: int) -> None:
        self._max_per_engine = max_per_engine
        self._most = float(max_per_engine)
        self._held_until_s = 0.0
        # Grows with every line until somebody waits for the first time, then by one in the time of a line.
        self._is_first = True
        self._may_grow = True
        self._asked_lately = self._is_paused = self._others_begin = False
        self._firsts = FirstTokens()
        self._paused_until_s = self._next_pause_s = 0.0
        # When the last line began; beside others the next one follows no sooner than the second moment.
        self._began_s = self._rests_until_s = float("-inf")
        # Lines where nobody asked lately, and beside others: less than one is one for that part of the time.
        self.size = self.beside = 1.0

    def look(self, now_s: float, what: WhatElse) -> None:
        """What there is now."""
        share = _BESIDE_OTHERS if what.others_run else 1.0
        self._most = max(1.0, self._max_per_engine * share) * what.num_engines
        self._asked_lately = what.asked_s is not None and now_s - what.asked_s < _LATELY_S
        self._may_grow = not (what.others_wait or what.queued or self._asked_lately)
        if what.others_wait and now_s >= self._held_until_s:
            self._held_until_s = now_s + _HOLD_S
            self._is_first = False
            self.size = max(1.0, min(self.size, self._most) / 2)
            # Below one line only first tokens that are known without lines tell that lines are why.
            self.beside = min(self.beside, max(1.0, self.beside / 2))
        stale = now_s - self._firsts.known_s > _KNOWN_S
        if self._asked_lately and stale and now_s >= self._next_pause_s:
            self._paused_until_s = now_s + _PAUSE_S
            self._next_pause_s = self._paused_until_s + _KNOWN_S
        self._is_paused = now_s < self._paused_until_s
        self._others_begin = what.others_begin

    def first_token(self, took_s: float, now_s: float, *, is_alone: bool) -> None:
        """Another request's first token came after `took_s`; whether no line was under way meanwhile."""
        late_s = self._firsts.late_s
        # Between lines that rest it is the early tokens that meet none: all that come then are judged alike.
        rests = now_s - took_s < self._rests_until_s and not self._is_paused
        if is_alone and not rests:
            self._firsts.add(took_s, now_s)
            self._paused_until_s = 0.0
        elif late_s is not None:
            is_late = took_s > late_s
            grown = self.beside * (1 + _GAIN * (_LATE_BESIDE - is_late))
            # No further than it reaches: more would only have to be taken back.
            self.beside = max(_LEAST_BESIDE, min(grown, self._most))

    def began(self, now_s: float) -> None:
        """A line begins."""
        self._began_s = now_s

    def ended(self, now_s: float, took_s: float) -> None:
        """A line has ended, `took_s` after it began."""
        if self.beside < 1.0:
            self._rests_until_s = now_s + took_s * (1.0 / self.beside - 1.0)
        if self._may_grow:
            grown = self.size + (1.0 if self._is_first else 1.0 / self.size)
            # What it had before others came it has again when they are gone.
            self.size = max(self.size, min(grown, self._most))

    def has_room(self, num_under_way: int, now_s: float) -> bool:
        """Whether another line may begin."""
        if self._is_paused:
            return False
        size = self.beside if self._asked_lately else self.size
        if self._others_begin:
            # The beginning of a line costs the most, and there is time for it when the token is there.
            if now_s - self._began_s < _HELD_S:
                return False
            size = min(size, 1.0)
        if size < 1.0 and now_s < self._rests_until_s:
            return False
        return num_under_way < int(min(max(size, 1.0), self._most))
