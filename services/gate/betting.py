"""Bets on a mean, on counts of what was seen how often: wealth does not depend on the order of cases.

Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS-B 2024. `statistics`
counts the differences of cases, and services.rollout has counters of metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

# Stakes, from those for small effects to nearly everything; the same weight each.
STAKES = (*(2.0**-power for power in range(7, 0, -1)), 0.7, 0.85, 0.95, 0.99)
_BISECTIONS = 25
_TINY = 1e-9


def evidence_above(tally: Mapping[float, float], mean: float = 0.0) -> float:
    """Logarithm of the wealth of betting that the mean is above `mean`, after so many cases of each value.

    Values are in [-1, 1], counts at least 0. At log(1/alpha) it is shown at level alpha, at whatever look.
    """
    gains = [((1.0 + value) / (1.0 + mean) - 1.0, count) for value, count in tally.items() if count]
    if not gains:
        return 0.0
    wealth = [sum(count * math.log1p(stake * gain) for gain, count in gains) for stake in STAKES]
    top = max(wealth)
    return top + math.log(sum(math.exp(each - top) for each in wealth) / len(wealth))


def evidence_below(tally: Mapping[float, float], mean: float = 0.0) -> float:
    """As `evidence_above`, of the mean being below `mean`."""
    return evidence_above({-value: count for value, count in tally.items()}, -mean)


def lowest_rate(num_hits: float, num_all: float, alpha: float) -> float:
    """A bound that the probability of a hit is below with probability `alpha` at most, at whatever look."""
    if not num_hits:
        return 0.0
    tally = {1.0: num_hits, -1.0: num_all - num_hits}
    limit, low, high = math.log(1.0 / alpha), _TINY, num_hits / num_all
    if evidence_above(tally, 2 * low - 1) < limit:
        return 0.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        # Wealth falls as the mean that it is bet against rises.
        low, high = (middle, high) if evidence_above(tally, 2 * middle - 1) >= limit else (low, middle)
    return low


def highest_rate(num_hits: float, num_all: float, alpha: float) -> float:
    """A bound that the probability of a hit is above with probability `alpha` at most, at whatever look."""
    return 1.0 - lowest_rate(num_all - num_hits, num_all, alpha)
