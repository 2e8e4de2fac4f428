"""The tests on paired differences: their levels, their bounds, and the textbook's figures."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from services.gate import statistics
from services.gate.cases import GateVerdict
from services.gate.suite import TokensLayer, read_suite
from services.gate.verdict import LayerRule


def _differences(mean: float, count: int, seed: int) -> NDArray[np.float64]:
    """-1, 0 and 1 with this mean."""
    random = np.random.default_rng(seed)
    up, down = 0.2 + mean / 2, 0.2 - mean / 2
    return random.choice([1.0, -1.0, 0.0], size=count, p=[up, down, 1 - up - down])


def test_evidence_stays_below_its_limit_at_every_look() -> None:
    """Ville's inequality: somebody who looks after each case is misled no oftener than alpha."""
    alpha, misled = 0.1, 0
    for seed in range(300):
        differences = _differences(0.0, 200, seed)
        looks = (statistics.evidence_above(differences[:count]) for count in range(1, 201, 5))
        misled += any(look >= math.log(1 / alpha) for look in looks)
    # 30 are expected at most; bets leave some of it.
    assert 1 <= misled <= 30


def test_evidence_grows_where_there_is_a_difference() -> None:
    found = [statistics.evidence_above(_differences(0.2, 300, seed)) for seed in range(50)]
    assert np.mean([each >= math.log(600) for each in found]) > 0.9
    assert max(statistics.evidence_above(_differences(-0.2, 300, seed)) for seed in range(50)) < math.log(20)


def test_evidence_does_not_depend_on_the_order() -> None:
    differences = _differences(0.1, 100, 0)
    assert statistics.evidence_above(differences) == pytest.approx(
        statistics.evidence_above(differences[::-1].copy())
    )


@pytest.mark.parametrize("mean", [-0.3, 0.0, 0.3])
def test_bounds_hold_the_mean(mean: float) -> None:
    outside = 0
    for seed in range(200):
        bounds = statistics.interval(_differences(mean, 100, seed), 0.05)
        outside += not bounds.lower <= mean <= bounds.upper
    assert outside <= 20
    assert bounds.upper - bounds.lower < 0.6


def test_bounds_of_nothing_are_everything() -> None:
    empty = np.array([])
    assert statistics.interval(empty, 0.05) == statistics.MeanBounds(lower=-1.0, upper=1.0)
    assert statistics.evidence_above(empty) == 0.0


def test_bootstrap_is_about_two_standard_errors_wide() -> None:
    differences = _differences(0.1, 400, 3)
    error = differences.std() / math.sqrt(400)
    bounds = statistics.bootstrap(differences)
    assert bounds.lower == pytest.approx(differences.mean() - 1.96 * error, abs=0.3 * error)
    assert bounds.upper == pytest.approx(differences.mean() + 1.96 * error, abs=0.3 * error)


def test_mcnemar() -> None:
    """Of ten pairs that differ, nine are lost: (10 + 1) of 1,024 ways have as many."""
    baseline = [1.0] * 9 + [0.0] + [1.0] * 50
    candidate = [0.0] * 9 + [1.0] + [1.0] * 50
    assert statistics.mcnemar(baseline, candidate) == pytest.approx(11 / 1024)
    assert statistics.mcnemar([1.0] * 5000, [0.0] * 5000) == pytest.approx(0.0)
    assert statistics.mcnemar([], []) == 1.0


def test_answers_of_one_question_are_one_piece_of_evidence() -> None:
    found = statistics.by_question(["a", "b", "a", "a"], [1.0, 0.5, 0.0, 0.5])
    assert found == [0.5, 0.5]
    repeated = statistics.by_question(["a"] * 1000, [1.0] * 1000)
    assert statistics.evidence_above(repeated) < math.log(3)


def test_so_many_more_are_enough() -> None:
    rule = LayerRule(delta=0.05, alarm=0.01, miss=0.05)
    differences = np.zeros(30)
    assert rule.decide(differences) is GateVerdict.NOT_ENOUGH
    more = statistics.more_needed(differences, rule.delta, rule.alarm, rule.miss)
    assert more is not None
    assert rule.decide(np.zeros(30 + more)) is GateVerdict.NOT_WORSE
    assert rule.decide(np.zeros(30 + more - 2)) is GateVerdict.NOT_ENOUGH


def test_a_small_loss_that_is_certain_is_not_worse_by_more_than_delta() -> None:
    random = np.random.default_rng(0)
    differences = random.choice([1.0, 0.0], size=20_000, p=[0.02, 0.98])
    assert statistics.interval(differences, 0.01).lower > 0
    assert LayerRule(delta=0.05, alarm=0.01, miss=0.05).decide(differences) is GateVerdict.NOT_WORSE


def test_where_either_direction_counts_a_gain_is_worse() -> None:
    gains = -np.ones(40) * 0.5
    assert LayerRule(delta=0.05, alarm=0.01, miss=0.05).decide(gains) is GateVerdict.NOT_WORSE
    assert LayerRule(delta=0.05, alarm=0.01, miss=0.05, two_sided=True).decide(gains) is GateVerdict.WORSE


def test_layers_share_what_false_alarms_there_may_be() -> None:
    suite = read_suite(None)
    assert suite.alarm() == pytest.approx(0.01 / 6)
    told = type(suite)(tokens=TokensLayer(decides=False), task=suite.task, false_alarm=0.02)
    assert told.alarm() == pytest.approx(0.02)
