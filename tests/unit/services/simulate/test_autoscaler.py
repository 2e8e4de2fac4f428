"""The rule that counts wanted engines, over a day's shape, beside an oracle that knows what comes."""

from __future__ import annotations

import msgspec

from services.bench.workload import Lengths
from services.simulate.arrivals import ArrivingRequest
from services.simulate.outcome import Objective, run_figures
from services.simulate.scenario import SCALE_INTERVAL_S, Scaling, Scenario
from services.simulate.step_model import EngineSetup, StepModel, speed_of
from tests.unit.services.simulate.deployment import load, scenario, setup

# An engine that one request in two seconds fills, so that few requests are a day's.
SLOW = StepModel(0.1, 0.02, 0.0, 0.04, 0.008, 0.0)
LOAD_S = 60.0
HOLD_S = 120.0
DAY_S = 3600.0
# So many times an oracle's engine-hours are allowed. The oracle knows every arrival and has no spare.
FACTOR = 1.25


def _engine() -> EngineSetup:
    limits = setup(max_num_seqs=16)
    return msgspec.structs.replace(limits, model=SLOW, speed=speed_of(SLOW), load_s=LOAD_S)


def _day(rate: float = 0.8) -> Scenario:
    lengths = {"input_tokens": Lengths.parse("lognormal:100:0.5"), "output_tokens": Lengths.parse("40")}
    what = load(rate, DAY_S, pattern="diurnal", tiers={}, **lengths)
    return scenario(
        what,
        _engine(),
        autoscaling={"load_s": LOAD_S, "hold_s": HOLD_S},
        scaling=Scaling(least=1, most=32),
        objectives={"standard": Objective(ttft_s=6.0, tpot_s=1.0)},
    )


def _oracle_s(asked: Scenario, goodput: float, window_s: float) -> float:
    """Engine-seconds of the least number of engines for each window, known before; each more has a start."""
    arrivals, total_s, before = asked.arrivals(0), 0.0, 1
    for number in range(round(DAY_S / window_s)):
        start_s = number * window_s
        part = [
            each._replace(at_s=each.at_s - start_s)
            for each in arrivals
            if start_s <= each.at_s < start_s + window_s
        ]
        alone = msgspec.structs.replace(asked, load=tuple(part), scaling=None)
        least, _ = alone.smallest([0], goodput, 32, lambda count, worst: None)
        assert least is not None
        total_s += least * window_s + max(0, least - before) * LOAD_S
        before = least
    return total_s


def test_a_day_costs_little_more_than_an_oracle_at_no_less_goodput() -> None:
    asked = _day()
    fleet = asked.served(1, 0)
    figures = run_figures(fleet, asked.objectives)
    assert figures.total.goodput >= 0.98
    oracle_s = _oracle_s(asked, 0.98, 300.0)
    assert oracle_s < figures.engine_s <= FACTOR * oracle_s, figures.engine_s / oracle_s
    # And as many as noon needs, all day, are more.
    assert figures.engine_s < 0.8 * DAY_S * max(node.index + 1 for node in fleet.nodes if node.held_s)


def test_engines_do_not_come_and_go_with_waves() -> None:
    """Bursts of a minute's period: engines that were started stay."""
    asked = msgspec.structs.replace(
        _day(),
        load=load(
            3.0,
            900.0,
            pattern="bursts",
            tiers={},
            input_tokens=Lengths.parse("100"),
            output_tokens=Lengths.parse("40"),
        ),
    )
    fleet = asked.served(1, 0)
    starts = [node.num_starts for node in fleet.nodes]
    assert sum(starts) > 2
    assert max(starts) == 1


def test_from_zero_one_is_started_and_it_goes_when_nobody_asks() -> None:
    arrivals = [
        ArrivingRequest(5.0, 100, 20),
        ArrivingRequest(100.0, 100, 20),
        ArrivingRequest(1200.0, 100, 20),
        ArrivingRequest(3000.0, 9, 1),
    ]
    asked = msgspec.structs.replace(
        scenario(arrivals, _engine(), autoscaling={"load_s": LOAD_S, "hold_s": HOLD_S, "idle_s": 300.0}),
        scaling=Scaling(least=0, most=4),
    )
    fleet = asked.served(1, 0)
    # Nobody waits in a gateway: who comes before there is an engine is told to come back.
    assert [each.failure for each in fleet.served] == [
        "ENGINE_UNAVAILABLE",
        "",
        "ENGINE_UNAVAILABLE",
        "ENGINE_UNAVAILABLE",
    ]
    held = [node.held_s for node in fleet.nodes]
    assert held[1:] == [0.0] * 3
    # Twice it was there for as long as somebody may come back, and a little more.
    assert 95.0 + 300.0 + 300.0 <= held[0] <= 95.0 + 300.0 + 300.0 + LOAD_S + 6 * SCALE_INTERVAL_S
