"""What figures lead to: bad candidates go at once, good ones advance, and chance takes few of them back."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gate import betting, statistics
from services.gate.cases import GateVerdict
from services.rollout.decision import RolloutAction, Situation, Why, decide
from services.rollout.evidence import compare_rates
from services.rollout.plan import GateFigures, LiveFigures, RolloutPlan, RolloutStep, ShadowFigures

PLAN = RolloutPlan()
RATES = ("errors", "goodput", "validity")
GOOD = {
    **{f"baseline.{rate}.all": 100_000.0 for rate in RATES},
    **{f"candidate.{rate}.all": 5_000.0 for rate in RATES},
    "shadow.better.neither": 5_000.0,
}


def situation(counts: dict[str, float], **more: Any) -> Situation:
    return Situation(**{"step": 0, "seconds": 1e6, "counts": counts, "num_gateways": 2, **more})


@pytest.mark.parametrize("step", range(3))
def test_a_candidate_that_is_shown_to_be_as_good_advances(step: int) -> None:
    found = decide(PLAN, situation(GOOD, step=step))
    assert (found.action, found.why) == (RolloutAction.ADVANCE, Why.GOOD)
    assert {each.figure for each in found.evidence} == {*RATES, "shadow pairs"}
    assert {each.verdict for each in found.evidence} == {GateVerdict.NOT_WORSE}


@pytest.mark.parametrize("rate", RATES)
def test_three_bad_ones_at_one_per_cent_are_enough(rate: str) -> None:
    """As soon as a thousand others were good, and long before the step ends."""
    counts = {f"baseline.{rate}.all": 1000.0, f"candidate.{rate}.all": 3.0, f"candidate.{rate}.bad": 3.0}
    found = decide(PLAN, situation(counts, seconds=3.0))
    assert (found.action, found.why) == (RolloutAction.TAKE_BACK, Why.WORSE)
    assert found.reason.startswith(f"{rate}: 100.0% of 3 are bad")
    counts[f"candidate.{rate}.bad"] = counts[f"candidate.{rate}.all"] = 1.0
    assert decide(PLAN, situation(counts, seconds=3.0)).action is RolloutAction.HOLD


@pytest.mark.parametrize(("delta", "needed"), [(0.01, 514), (0.05, 101)])
def test_so_many_requests_without_an_error_show_it_as_the_page_says(delta: float, needed: int) -> None:
    plenty = (0.0, 1e6)
    before, then = (
        compare_rates("errors", plenty, (0.0, float(number)), delta, PLAN.alarm, PLAN.miss).verdict
        for number in (needed - 1, needed)
    )
    assert (before, then) == (GateVerdict.NOT_ENOUGH, GateVerdict.NOT_WORSE)


@pytest.mark.parametrize(
    ("num_baseline", "num_candidate", "failed"), [(1000, 2, 2), (100, 4, 4), (1000, 12, 4)]
)
def test_so_few_failures_take_back_as_the_page_says(
    num_baseline: int, num_candidate: int, failed: int
) -> None:
    counts = {
        "baseline.errors.all": float(num_baseline),
        "candidate.errors.all": float(num_candidate),
        "candidate.errors.bad": float(failed),
    }
    assert decide(PLAN, situation(counts, seconds=1.0)).action is RolloutAction.TAKE_BACK
    counts["candidate.errors.bad"] = counts["candidate.errors.all"] = 1.0
    assert decide(PLAN, situation(counts, seconds=1.0)).action is RolloutAction.HOLD


def test_copies_that_fail_take_back_before_a_client_has_met_it() -> None:
    counts = {"baseline.errors.all": 100.0, "shadow.better.live": 15.0}
    assert decide(PLAN, situation(counts, seconds=1.0)).action is RolloutAction.TAKE_BACK


def test_answers_that_should_agree_and_do_not_take_back() -> None:
    plan = RolloutPlan(shadow=ShadowFigures(agreement=0.8))
    same, other = {"shadow.agreement.1": 60.0}, {"shadow.agreement.0.05": 40.0}
    assert decide(plan, situation(other)).reason.startswith("shadow agreement: ")
    assert decide(plan, situation({**GOOD, **same})).action is RolloutAction.ADVANCE
    # Another model words everything its own way.
    assert decide(PLAN, situation({**GOOD, **other})).action is RolloutAction.ADVANCE


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"num_gateways": 0}, Why.UNSEEN),
        ({"unfollowed": ("gateway-1",)}, Why.UNFOLLOWED),
        ({"without_engine_s": 1.0}, Why.NO_ENGINE),
        ({"seconds": 59.0}, Why.TIME),
        ({"counts": {**GOOD, "candidate.errors.all": 49.0}}, Why.REQUESTS),
        ({"step": 1, "counts": {**GOOD, "candidate.validity.all": 5.0}}, Why.PROOF),
    ],
)
def test_what_lacks_holds(more: dict[str, Any], why: Why) -> None:
    found = decide(PLAN, situation(**{"counts": GOOD, **more}))
    assert (found.action, found.why) == (RolloutAction.HOLD, why)


def test_an_engine_that_stays_away_takes_back_and_so_does_patience() -> None:
    assert decide(PLAN, situation(GOOD, without_engine_s=11.0)).why is Why.NO_ENGINE
    assert decide(PLAN, situation(GOOD, without_engine_s=11.0)).action is RolloutAction.TAKE_BACK
    plan = RolloutPlan(patience_s=600.0)
    waiting = {**GOOD, "candidate.errors.all": 1.0}
    assert decide(plan, situation(waiting, seconds=599.0)).action is RolloutAction.HOLD
    assert decide(plan, situation(waiting, seconds=600.0)).why is Why.PATIENCE


def test_the_gate_s_suite_decides_with() -> None:
    plan = RolloutPlan(gate=GateFigures())
    found = decide(plan, situation(GOOD))
    assert (found.action, found.why, found.reason) == (
        RolloutAction.HOLD,
        Why.GATE,
        "the gate: its suite runs",
    )
    worse = decide(plan, situation({}, gate=GateVerdict.WORSE, gate_note="task worse"))
    assert (worse.action, worse.reason) == (RolloutAction.TAKE_BACK, "the gate: task worse")
    assert decide(plan, situation(GOOD, gate=GateVerdict.NOT_WORSE)).action is RolloutAction.ADVANCE


def test_by_hand_waits_for_a_person_and_takes_back_without() -> None:
    plan = RolloutPlan(advance="by hand")
    assert decide(plan, situation(GOOD)).why is Why.BY_HAND
    bad = {"baseline.errors.all": 1000.0, "candidate.errors.all": 9.0, "candidate.errors.bad": 9.0}
    assert decide(plan, situation(bad)).action is RolloutAction.TAKE_BACK


def test_a_figure_that_is_switched_off_decides_nothing() -> None:
    plan = RolloutPlan(live=LiveFigures(errors=0.0))
    bad = {**GOOD, "candidate.errors.bad": 5_000.0}
    assert decide(plan, situation(bad)).action is RolloutAction.ADVANCE


counts_of_a_side = st.tuples(st.integers(0, 400), st.integers(0, 400)).map(
    lambda pair: (float(min(pair)), float(max(pair)))
)


@given(baseline=counts_of_a_side, candidate=counts_of_a_side, delta=st.floats(0.001, 0.5))
def test_a_rate_is_within_its_bounds_and_never_both(
    baseline: tuple[float, float], candidate: tuple[float, float], delta: float
) -> None:
    found = compare_rates("errors", baseline, candidate, delta, 0.001, 0.05)
    assert found.lower <= found.difference + 1e-9
    assert found.difference <= found.upper + 1e-9
    if found.verdict is GateVerdict.WORSE:
        assert found.difference >= delta
    if found.verdict is GateVerdict.NOT_WORSE:
        assert found.difference < delta


@given(baseline=counts_of_a_side, candidate=counts_of_a_side, more=st.integers(1, 50))
def test_more_failures_never_make_it_better(
    baseline: tuple[float, float], candidate: tuple[float, float], more: int
) -> None:
    rank = [GateVerdict.NOT_WORSE, GateVerdict.NOT_ENOUGH, GateVerdict.WORSE]
    worse = (candidate[0] + more, candidate[1] + more)
    before, after = (
        compare_rates("errors", baseline, each, 0.01, 0.001, 0.05) for each in (candidate, worse)
    )
    assert rank.index(after.verdict) >= rank.index(before.verdict)
    assert after.lower >= before.lower - 1e-9


@given(st.lists(st.sampled_from([-1.0, -0.25, 0.0, 0.5, 1.0]), max_size=60), st.floats(-0.9, 0.9))
def test_counts_show_what_the_cases_show(values: list[float], mean: float) -> None:
    tally = {value: float(values.count(value)) for value in set(values)}
    cases = np.array(values, dtype=np.float64)
    assert betting.evidence_above(tally, mean) == pytest.approx(statistics.evidence_above(cases, mean))
    assert betting.evidence_below(tally, mean) == pytest.approx(statistics.evidence_below(cases, mean))


# Small numbers, so that a rollout is simulated in milliseconds.
QUICK = RolloutPlan(
    steps=(
        RolloutStep(share=0.01, requests=5, seconds=0.0, proof=False),
        RolloutStep(share=0.1, requests=50, seconds=0.0),
        RolloutStep(share=0.5, requests=200, seconds=0.0),
    ),
    live=LiveFigures(errors=0.05, goodput=0.1, validity=0.0),
    shadow=ShadowFigures(delta=0.05),
)


def simulate(plan: RolloutPlan, draw: random.Random, errors: dict[str, float]) -> tuple[RolloutAction, int]:
    """How it ends, and in which step: requests come by shares, and after every hundred one looks."""
    step, counts = 0, dict[str, float]()

    def add(name: str) -> None:
        counts[name] = counts.get(name, 0.0) + 1

    for _ in range(200):
        for _ in range(100):
            side = "candidate" if draw.random() < plan.share(step) else "baseline"
            for rate, chance in (("errors", errors[side]), ("goodput", 0.1)):
                add(f"{side}.{rate}.all")
                if draw.random() < chance:
                    add(f"{side}.{rate}.bad")
            if draw.random() < 0.1:
                lost, won = draw.random() < errors["candidate"], draw.random() < errors["baseline"]
                add(f"shadow.better.{'neither' if lost == won else 'live' if lost else 'shadow'}")
        found = decide(plan, situation(dict(counts), step=step))
        if found.action is RolloutAction.TAKE_BACK:
            return found.action, step
        if found.action is RolloutAction.ADVANCE:
            step, counts = step + 1, {}
            if step == len(plan.steps):
                return found.action, step
    return RolloutAction.HOLD, step


def test_one_that_is_as_good_is_seldom_taken_back_though_it_is_looked_at_all_the_time() -> None:
    plan = msgspec.structs.replace(QUICK, false_alarm=0.05)
    ends = [simulate(plan, random.Random(seed), {"baseline": 0.03, "candidate": 0.03}) for seed in range(40)]
    # Of 40 at 5 %, two are what one would expect of a test that is exact.
    assert [action for action, _ in ends].count(RolloutAction.TAKE_BACK) <= 2
    assert [action for action, _ in ends].count(RolloutAction.ADVANCE) >= 35


def test_one_that_fails_often_never_passes_ten_per_cent() -> None:
    ends = [simulate(QUICK, random.Random(seed), {"baseline": 0.01, "candidate": 0.4}) for seed in range(30)]
    assert {action for action, _ in ends} == {RolloutAction.TAKE_BACK}
    assert max(step for _, step in ends) <= 1
