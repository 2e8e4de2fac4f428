"""Tests on paired differences that may be looked at after every case, and what is told beside them.

A difference is of one question: how much better the baseline did than the candidate, in [-1, 1]. Questions
are independent, answers within one are not, so a question's answers are averaged before they come here.

The decision is a bet (`betting`): someone who starts with 1 and stakes a share c of it on every difference
being above m has, if the mean is at most m, wealth whose expectation never exceeds 1. By Ville's inequality
it ever reaches 1/alpha with probability alpha at most: looking after each case, and stopping when it is
decided, cost nothing. Shares are mixed, which needs no tuning and makes the wealth the same in whatever order
differences came.

Python alone: a layer has hundreds of cases, and a rollout is watched in an image without numpy.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from services.gate import betting

Differences: TypeAlias = Collection[float]

_BISECTIONS = 40
# No more cases than so many times those there are: a forecast beyond is none.
MOST_TIMES = 200


@dataclass(frozen=True, kw_only=True)
class MeanBounds:
    """Bounds of a mean that hold at every look."""

    lower: float
    upper: float


def mean_of(values: Collection[float]) -> float:
    """The mean; 0 of none."""
    return math.fsum(values) / len(values) if len(values) else 0.0


def evidence_above(differences: Differences, mean: float = 0.0, *, times: float = 1.0) -> float:
    """Logarithm of the wealth of betting that the mean of `differences` [n] is above `mean`.

    At log(1/alpha) that is shown at level alpha. `times` forecasts: as if so many times the cases had come.
    """
    return betting.evidence_above(_tally(differences, times), mean)


def evidence_below(differences: Differences, mean: float = 0.0, *, times: float = 1.0) -> float:
    """As `evidence_above`, of the mean being below `mean`."""
    return betting.evidence_below(_tally(differences, times), mean)


def _tally(differences: Differences, times: float = 1.0) -> dict[float, float]:
    return {value: count * times for value, count in Counter(differences).items()}


def interval(differences: Differences, alpha: float) -> MeanBounds:
    """Bounds of the mean, each of which fails at any look with probability `alpha` at most."""
    tally, mean = _tally(differences), mean_of(differences)
    mirrored = {-value: count for value, count in tally.items()}
    return MeanBounds(lower=_lower(tally, mean, alpha), upper=-_lower(mirrored, -mean, alpha))


def _lower(tally: dict[float, float], mean: float, alpha: float) -> float:
    limit = math.log(1.0 / alpha)
    low, high = -1.0 + 1e-9, mean
    if not tally or betting.evidence_above(tally, low) < limit:
        return -1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        # Wealth falls as the mean that it is bet against rises.
        low, high = (middle, high) if betting.evidence_above(tally, middle) >= limit else (low, middle)
    return low


def bootstrap(
    differences: Differences, *, level: float = 0.95, draws: int = 2000, seed: int = 0
) -> MeanBounds:
    """Percentile interval of the mean over questions drawn anew with replacement (Efron 1979).

    It is for a fixed number of cases, and is told, not decided by.
    """
    if not len(differences):
        return MeanBounds(lower=-1.0, upper=1.0)
    generator, values = random.Random(seed), list(differences)
    means = sorted(mean_of(generator.choices(values, k=len(values))) for _ in range(draws))
    tail = round((1 - level) / 2 * (draws - 1))
    return MeanBounds(lower=means[tail], upper=means[draws - 1 - tail])


def mcnemar(baseline: Sequence[float], candidate: Sequence[float]) -> float:
    """McNemar's exact test, one-sided: how probable so many losses are among the pairs that differ, were
    losing and winning equally probable (McNemar 1947, exact form). Scores of at least 1/2 count as right.
    """
    pairs = [(ours >= 0.5, theirs >= 0.5) for ours, theirs in zip(baseline, candidate, strict=True)]
    lost = sum(ours and not theirs for ours, theirs in pairs)
    won = sum(theirs and not ours for ours, theirs in pairs)
    total = lost + won
    # Sums of integers: 2.0 ** total has no room for many pairs.
    return sum(math.comb(total, count) for count in range(lost, total + 1)) / (1 << total)


def more_needed(differences: Differences, delta: float, alarm: float, miss: float) -> int | None:
    """How many more questions would decide if they came as those so far; None if MOST_TIMES as many would
    not.
    """
    num = len(differences)
    if not num:
        return None
    loses = mean_of(differences) >= delta

    def decided(times: float) -> bool:
        tally = _tally(differences, times)
        not_worse = betting.evidence_below(tally, delta) >= math.log(1 / miss)
        return not_worse or (loses and betting.evidence_above(tally) >= math.log(1 / alarm))

    if not decided(MOST_TIMES):
        return None
    low, high = 1.0, float(MOST_TIMES)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if decided(middle) else (middle, high)
    return max(math.ceil(num * high) - num, 1)


def by_question(questions: Sequence[str], differences: Sequence[float]) -> list[float]:
    """Means of each question's differences, in the order in which questions first came."""
    groups: dict[str, list[float]] = {}
    for question, difference in zip(questions, differences, strict=True):
        groups.setdefault(question, []).append(difference)
    return [mean_of(each) for each in groups.values()]
