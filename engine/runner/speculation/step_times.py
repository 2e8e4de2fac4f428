"""How long decode steps take by their rows, from the latest measurements on this machine.

What an engine's first steps are measured with (engine.core.warm_up) is in them, because these steps come here
like all others.
"""

from __future__ import annotations

from collections import deque
from statistics import median

import numpy as np
from numpy.typing import NDArray

# Measurements of which the median counts; with fewer than that the least does, since what disturbs a step
# makes it longer.
_LATEST, FEW = 9, 3


class Recent:
    """The latest few measurements; 0 while there are none."""

    __slots__ = ("_value", "_values")

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_LATEST)
        # None: to be found out, because most measurements are not asked about before the next one.
        self._value: float | None = 0.0

    @property
    def is_rough(self) -> bool:
        """Whether there are few."""
        return len(self._values) < FEW

    @property
    def value(self) -> float:
        """What counts of them."""
        if self._value is None:
            self._value = min(self._values) if self.is_rough else median(self._values)
        return self._value

    def add(self, value: float) -> None:
        """Takes one in."""
        self._values.append(value)
        self._value = None


def size_class(num_sequences: int) -> int:
    """Batches that are alike enough to share measurements are named by the largest of them."""
    return num_sequences if num_sequences <= 8 else -(-num_sequences // 8) * 8


def _rounded(num_drafts: int) -> int:
    """Numbers of drafts that share measurements: within an eighth."""
    step = 1 << max(0, num_drafts.bit_length() - 3)
    return -(-num_drafts // step) * step


class StepTimes:
    """Seconds of plain steps by sequences, and how many times as long steps with drafts take."""

    def __init__(self) -> None:
        self._plain: dict[int, Recent] = {}
        self._factors: dict[int, dict[int, Recent]] = {}
        # Those of one sequence, until a step of a kind that is hardly known, or so many others, came.
        self._of_one: list[float] = []
        self._num_added = 0

    def add(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """Takes in a step in which every sequence decoded."""
        self._num_added += 1
        if self._num_added % _LATEST == 0:
            self._of_one = []
        if not num_drafts:
            found = self._plain.get(num_sequences)
            if found is None:
                found = self._plain[num_sequences] = Recent()
            found.add(seconds)
        elif plain_s := self.plain_s(num_sequences):
            factors = self._factors.setdefault(size_class(num_sequences), {})
            known = factors.setdefault(_rounded(num_drafts), Recent())
            known.add(seconds / plain_s)
            if known.is_rough:
                self._of_one = []

    def plain_s(self, num_sequences: int) -> float:
        """Seconds of a plain step: measured, or between those of the next smaller and larger batch; 0 where
        it is not known.
        """
        found = self._plain.get(num_sequences)
        if found is not None:
            return found.value
        below = max((each for each in self._plain if each < num_sequences), default=0)
        above = min((each for each in self._plain if each > num_sequences), default=0)
        if not below or not above:
            return 0.0
        part = (num_sequences - below) / (above - below)
        return (1 - part) * self._plain[below].value + part * self._plain[above].value

    def num_known(self, num_sequences: int) -> int:
        """The most drafts with which a step was measured."""
        return max(self._factors.get(size_class(num_sequences), ()), default=0)

    def factors_of_one(self, most: int) -> list[float]:
        """The same as `factors` of one sequence, of a little while ago."""
        if len(self._of_one) <= most:
            self._of_one = self.factors(1, most).tolist()
        return self._of_one

    def factors(self, num_sequences: int, most: int) -> NDArray[np.float64]:
        """How many times as long a step takes with 0 to `most` drafts [most + 1].

        Where none was measured, as long as plain steps with as many rows; beyond those, in proportion to the
        rows, which is more than it can be.
        """
        plain_s = self.plain_s(num_sequences)
        knots = {0: 1.0}
        for count, recent in self._factors.get(size_class(num_sequences), {}).items():
            # The first of a kind also pay for what is made when it is first needed.
            most_it_can_be = 1 + count / num_sequences if recent.is_rough else np.inf
            knots[count] = min(recent.value, most_it_can_be)
        last = max(knots)
        for sequences, recent in self._plain.items():
            if sequences > num_sequences + last and plain_s:
                knots[sequences - num_sequences] = recent.value / plain_s
        counts = np.array(sorted(knots), np.float64)
        # More rows never take less; measurements of fewer rows that say so were disturbed.
        values = np.minimum.accumulate(np.array([knots[int(count)] for count in counts])[::-1])[::-1]
        values = np.maximum(values, 1.0)
        drafts = np.arange(most + 1, dtype=np.float64)
        beyond = np.maximum(1.0, (num_sequences + drafts) / (num_sequences + counts[-1]))
        return np.asarray(np.interp(drafts, counts, values) * beyond)
