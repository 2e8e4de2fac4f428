"""How sure a model was while it wrote: DeepConf's group confidence (Fu et al., arXiv 2508.15260).

Engines compute each token's (`contract.outputs`). A group is a window of tokens; a trace is as weak as its
weakest group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Alternatives that a token's confidence is the mean of, as many as engines report.
TOP = 20
# The paper's window. Traces of fewer tokens have windows of a part of their length.
_MAX_WINDOW = 2048
_PART_OF_TRACE = 4
_MIN_WINDOW = 8
# Share of the traces that warm up whose weakest group is above the threshold.
_KEPT = 0.9


class Groups:
    """The groups of one trace, as it grows."""

    def __init__(self) -> None:
        # Of all tokens up to each: a window is a difference, however long it is.
        self._sums = [0.0]

    def add(self, confidences: Sequence[float]) -> None:
        """Takes in further tokens."""
        for each in confidences:
            self._sums.append(self._sums[-1] + each)

    def __len__(self) -> int:
        return len(self._sums) - 1

    def weakest(self, window: int, *, since: int = 0) -> float:
        """Mean of the weakest whole window, of those that end behind `since` tokens; of all tokens where
        there are fewer than a window, and infinity where no window ends there.
        """
        number, sums = len(self), self._sums
        if number < window:
            return _mean(sums[-1], number) if number and not since else math.inf
        ends = range(max(window, since + 1), number + 1)
        return min((_mean(sums[end] - sums[end - window], window) for end in ends), default=math.inf)


def _mean(total: float, number: int) -> float:
    """Rounded, so that equal windows are equal wherever they stand."""
    return round(total / number, 6)


def window_of(lengths: Sequence[int]) -> int:
    """Tokens of a group, for traces of about these lengths."""
    typical = sorted(lengths)[len(lengths) // 2]
    return max(_MIN_WINDOW, min(_MAX_WINDOW, typical // _PART_OF_TRACE))


def threshold(weakest: Sequence[float]) -> float:
    """Below it a trace ends: the percentile of those that warmed up, between neighbours in proportion."""
    ordered = sorted(weakest)
    place = (1 - _KEPT) * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
