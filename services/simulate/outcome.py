"""Figures of a simulated run, and of several with different seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from services.simulate.fleet import ServedRequest, VirtualFleet

# Of a Student t distribution, by degrees of freedom: between the two lies nine tenths.
_T90 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
_NORMAL90 = 1.645


class Objective(NamedTuple):
    """Targets of one request, in seconds; None sets none."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def is_met(self, served: ServedRequest) -> bool:
        """Whether the request was answered in full and in time."""
        if served.failure or not served.num_tokens:
            return False
        late = self.ttft_s is not None and served.ttft_s > self.ttft_s
        slow = self.tpot_s is not None and served.tpot_s > self.tpot_s
        return not late and not slow


class Figures(msgspec.Struct, kw_only=True):
    """Of all requests of a run, or of one tier. Seconds."""

    num_requests: int = 0
    num_refused: int = 0
    num_failed: int = 0
    num_continued: int = 0
    # Part of all that met their targets.
    goodput: float = 0.0
    ttft_p50_s: float = math.nan
    ttft_p99_s: float = math.nan
    tpot_p50_s: float = math.nan
    tpot_p99_s: float = math.nan
    # Longest time between two tokens of one answer.
    longest_gap_s: float = 0.0
    output_tokens_per_s: float = 0.0


class RunFigures(msgspec.Struct, kw_only=True):
    """Of one run."""

    total: Figures
    tiers: dict[str, Figures]
    duration_s: float
    # Seconds for which engines were there, loading included, and computed.
    engine_s: float
    busy_s: float
    failures: dict[str, int]


# What the gateway or an engine says to a request that it does not take.
_REFUSALS = frozenset({"QUEUE_LIMIT_EXCEEDED", "NEVER_FITS", "CONTEXT_LENGTH_EXCEEDED"})


def figures_of(
    served: Sequence[ServedRequest], objectives: Mapping[str, Objective], duration_s: float
) -> Figures:
    """The requests' figures; `objectives` are by tier."""
    firsts = sorted(each.ttft_s for each in served if each.num_tokens)
    tpots = sorted(each.tpot_s for each in served if each.num_tokens > 1)
    refused = sum(each.failure in _REFUSALS for each in served)
    good = sum(objectives.get(each.tier.name, Objective()).is_met(each) for each in served)
    return Figures(
        num_requests=len(served),
        num_refused=refused,
        num_failed=sum(bool(each.failure) for each in served) - refused,
        num_continued=sum(each.num_losses > 0 and not each.failure for each in served),
        goodput=good / len(served) if served else 1.0,
        ttft_p50_s=at_share(firsts, 0.5),
        ttft_p99_s=at_share(firsts, 0.99),
        tpot_p50_s=at_share(tpots, 0.5),
        tpot_p99_s=at_share(tpots, 0.99),
        longest_gap_s=max((each.gap_s for each in served), default=0.0),
        output_tokens_per_s=sum(each.num_tokens for each in served) / duration_s if duration_s else 0.0,
    )


def run_figures(fleet: VirtualFleet, objectives: Mapping[str, Objective]) -> RunFigures:
    """After `VirtualFleet.serve`."""
    served, duration_s = fleet.served, fleet.ended_s
    by_tier: dict[str, list[ServedRequest]] = {}
    for each in served:
        by_tier.setdefault(each.tier.name, []).append(each)
    failures = Counter(each.failure for each in served if each.failure)
    return RunFigures(
        total=figures_of(served, objectives, duration_s),
        tiers={name: figures_of(its, objectives, duration_s) for name, its in sorted(by_tier.items())},
        duration_s=duration_s,
        engine_s=fleet.engine_s,
        busy_s=math.fsum(node.busy_s for node in fleet.nodes),
        failures=dict(sorted(failures.items())),
    )


def at_share(ordered: Sequence[float], share: float) -> float:
    """The smallest value that so large a part does not exceed; nan of none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


class PredictionInterval(msgspec.Struct, frozen=True):
    """A value of runs with different seeds: their mean, and where one more run's lies nine times of ten."""

    mean: float
    low: float
    high: float


def interval(values: Sequence[float], most: float = math.inf) -> PredictionInterval:
    """Student's prediction interval, within what a value can be; of one value, that value."""
    known = [each for each in values if not math.isnan(each)]
    if not known:
        return PredictionInterval(math.nan, math.nan, math.nan)
    mean, count = math.fsum(known) / len(known), len(known)
    if count == 1 or max(known) - min(known) <= 1e-9 * abs(mean):
        return PredictionInterval(mean, mean, mean)
    deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in known) / (count - 1))
    factor = _T90[count - 2] if count - 2 < len(_T90) else _NORMAL90
    width = factor * deviation * math.sqrt(1 + 1 / count)
    # None of what is told here is below 0.
    return PredictionInterval(mean, max(0.0, mean - width), min(most, mean + width))


def over_seeds(
    runs: Sequence[RunFigures], value: Callable[[RunFigures], float], most: float = math.inf
) -> PredictionInterval:
    """One value of all runs, which is never more than that."""
    return interval([value(run) for run in runs], most)
