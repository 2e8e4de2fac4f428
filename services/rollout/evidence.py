"""What counts show of one figure: worse, not worse, or not enough. The tests hold at whatever look."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import msgspec

from observability.emit import names
from services.gate.betting import evidence_above, evidence_below, highest_rate, lowest_rate
from services.gate.cases import GateVerdict
from services.rollout import figures
from services.rollout.figures import BASELINE, CANDIDATE, ERRORS, GOODPUT, VALIDITY
from services.rollout.plan import RolloutPlan


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of both sides, as a decision keeps it."""

    figure: str
    verdict: GateVerdict
    # How much worse is worse.
    delta: float
    # Shares that are bad, of so many; of pairs, shares that a side lost.
    baseline: float
    candidate: float
    num_baseline: int
    num_candidate: int
    # How much worse the candidate is, with bounds that hold at every look.
    difference: float
    lower: float
    upper: float


def judge(counts: Mapping[str, float], plan: RolloutPlan) -> list[Evidence]:
    """Every figure that is to be judged and of which there is something."""
    return [each for each in _all(counts, plan) if each.num_baseline or each.num_candidate]


def _all(counts: Mapping[str, float], plan: RolloutPlan) -> Iterator[Evidence]:
    for rate, delta in (
        (ERRORS, plan.live.errors),
        (GOODPUT, plan.live.goodput),
        (VALIDITY, plan.live.validity),
    ):
        if delta:
            sides = [
                (counts.get(f"{side}.{rate}.bad", 0.0), counts.get(f"{side}.{rate}.all", 0.0))
                for side in (BASELINE, CANDIDATE)
            ]
            yield compare_rates(rate, sides[0], sides[1], delta, plan.alarm, plan.miss)
    if plan.shadow.delta:
        pairs = [counts.get(f"{figures.SHADOW_BETTER}{side}", 0.0) for side in ("live", "neither", "shadow")]
        yield compare_pairs(*pairs, delta=plan.shadow.delta, alarm=plan.alarm, miss=plan.miss)
    if plan.shadow.agreement:
        yield judge_agreement(figures.agreement(counts), plan.shadow.agreement, plan.alarm, plan.miss)


def compare_rates(
    figure: str,
    baseline: tuple[float, float],
    candidate: tuple[float, float],
    delta: float,
    alarm: float,
    miss: float,
) -> Evidence:
    """Two rates, each (bad, all), of other requests in the same time; each bound has half the level."""
    ours, theirs = (bad / number if number else 0.0 for bad, number in (baseline, candidate))
    lower = lowest_rate(*candidate, alarm / 2) - highest_rate(*baseline, alarm / 2)
    upper = highest_rate(*candidate, miss / 2) - lowest_rate(*baseline, miss / 2)
    if lower > 0 and theirs - ours >= delta:
        verdict = GateVerdict.WORSE
    else:
        verdict = GateVerdict.NOT_WORSE if upper < delta else GateVerdict.NOT_ENOUGH
    return Evidence(
        figure=figure,
        verdict=verdict,
        delta=delta,
        baseline=ours,
        candidate=theirs,
        num_baseline=int(baseline[1]),
        num_candidate=int(candidate[1]),
        difference=theirs - ours,
        lower=lower,
        upper=upper,
    )


def compare_pairs(
    lost: float, even: float, won: float, *, delta: float, alarm: float, miss: float
) -> Evidence:
    """Pairs of answers to one prompt, by the gate's own rule for a layer (`gate.verdict.LayerRule`)."""
    number = lost + even + won
    tally = {1.0: lost, 0.0: even, -1.0: won}
    difference = (lost - won) / number if number else 0.0
    if difference >= delta and evidence_above(tally) >= math.log(1 / alarm):
        verdict = GateVerdict.WORSE
    else:
        is_shown = evidence_below(tally, delta) >= math.log(1 / miss)
        verdict = GateVerdict.NOT_WORSE if is_shown else GateVerdict.NOT_ENOUGH
    return Evidence(
        figure="shadow pairs",
        verdict=verdict,
        delta=delta,
        baseline=won / number if number else 0.0,
        candidate=lost / number if number else 0.0,
        num_baseline=int(number),
        num_candidate=int(number),
        difference=difference,
        lower=lowest_rate(lost, number, alarm / 2) - highest_rate(won, number, alarm / 2),
        upper=highest_rate(lost, number, miss / 2) - lowest_rate(won, number, miss / 2),
    )


def judge_agreement(found: Mapping[float, float], least: float, alarm: float, miss: float) -> Evidence:
    """Answers by the upper bound of their agreement, against the mean that there must be at least.

    A bucket's answers count by the bound that speaks against the verdict.
    """
    bounds = (0.0, *names.SHADOW_AGREEMENT.buckets)
    under = dict(zip(bounds[1:], bounds[:-1], strict=True))
    nearest = {1.0 - bound: count for bound, count in found.items()}
    farthest = dict[float, float]()
    for bound, count in found.items():
        distance = 1.0 - under[bound]
        farthest[distance] = farthest.get(distance, 0.0) + count
    number, most = sum(found.values()), 1.0 - least
    if evidence_above(nearest, most) >= math.log(1 / alarm):
        verdict = GateVerdict.WORSE
    else:
        is_shown = evidence_below(farthest, most) >= math.log(1 / miss)
        verdict = GateVerdict.NOT_WORSE if is_shown else GateVerdict.NOT_ENOUGH
    mean = sum(distance * count for distance, count in nearest.items()) / number if number else 0.0
    widest = sum(distance * count for distance, count in farthest.items()) / number if number else 0.0
    return Evidence(
        figure="shadow agreement",
        verdict=verdict,
        delta=most,
        baseline=0.0,
        candidate=mean,
        num_baseline=int(number),
        num_candidate=int(number),
        difference=mean,
        lower=mean,
        upper=widest,
    )
