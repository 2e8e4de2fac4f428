"""How many engines are wanted: by what comes, how fast engines are, and for how long it is remembered."""

from __future__ import annotations

import math

import msgspec
import pytest

from contract.engines import EngineInfo, EngineLoad
from gateway.config import AutoscalingConfig
from gateway.engines.demand import CountForecast, EngineDemand, PoolDemand, StepLine

CONFIG = AutoscalingConfig(load_s=60, utilization=0.8, hold_s=300, idle_s=600)
INFO = EngineInfo(
    engine_id="e",
    model="m",
    vocabulary_fingerprint="",
    max_model_len=4096,
    block_size=16,
    num_blocks=100,
    max_num_seqs=16,
    max_num_batched_tokens=1024,
)


class Engine:
    """An attachment as far as it is counted."""

    def __init__(self, num_open: int = 0, unstarted_tokens: int = 0) -> None:
        self.load = EngineLoad()
        self.info: EngineInfo | None = INFO
        self.num_open = num_open
        self.unstarted_tokens = unstarted_tokens


def _known(config: AutoscalingConfig = CONFIG) -> PoolDemand:
    """Steps of 20 ms and 2 ms an answer, prompts at 1,000 tokens a second, answers of 50 tokens."""
    demand = PoolDemand(config)
    for num_running in (1, 2, 5, 10):
        seconds = 0.02 + 0.002 * num_running
        load = EngineLoad(
            num_running=num_running, prefill_tokens_per_s=1000.0, decode_tokens_per_s=num_running / seconds
        )
        demand.routed(load, INFO, 0)
    demand.ended(50)
    return demand


def _ask(
    demand: PoolDemand, per_s: float, start_s: float, seconds: float, target_s: float | None = None
) -> None:
    for number in range(round(per_s * seconds)):
        demand.asked(100, target_s, start_s + number / per_s)


def test_steady_work_is_divided_by_what_an_engine_does() -> None:
    demand = _known()
    _ask(demand, 4.0, 0.0, 300.0)
    # 16 answers a step of 52 ms: 3.25 ms a token.
    work = 4.0 * 50 * 0.052 / 16
    assert demand.engines([Engine()], 300.0) == pytest.approx(work / 0.8, rel=0.06)


def test_a_strict_target_takes_more_engines() -> None:
    loose, strict = _known(), _known()
    _ask(loose, 4.0, 0.0, 300.0, 0.2)
    # Three answers a step of 26 ms.
    _ask(strict, 4.0, 0.0, 300.0, 0.0265)
    work = 4.0 * 50 * 0.026 / 3
    assert strict.engines([Engine()], 300.0) == pytest.approx(work / 0.8, rel=0.06)
    assert loose.engines([Engine()], 300.0) < 0.6 * strict.engines([Engine()], 300.0)


def test_the_needs_of_gateways_add_up() -> None:
    whole, half, other = _known(), _known(), _known()
    _ask(whole, 4.0, 0.0, 300.0)
    _ask(half, 2.0, 0.0, 300.0)
    _ask(other, 2.0, 0.0, 300.0)
    apart = half.engines([Engine()], 300.0) + other.engines([Engine()], 300.0)
    assert apart == pytest.approx(whole.engines([Engine()], 300.0), rel=0.06)


def test_what_grows_is_seen_ahead_by_the_time_to_start_an_engine() -> None:
    near, far = (_known(msgspec.structs.replace(CONFIG, load_s=each)) for each in (1.0, 240.0))
    for demand in (near, far):
        for minute in range(20):
            _ask(demand, 1.0 + 0.2 * minute, 60.0 * minute, 60.0)
    assert 1.1 * near.engines([Engine()], 1200.0) < far.engines([Engine()], 1200.0)


def test_engines_that_are_slower_than_thought_are_noticed_by_what_is_open() -> None:
    demand = _known()
    _ask(demand, 1.0, 0.0, 300.0)
    usual = demand.engines([Engine(2), Engine(1)], 300.0)
    assert demand.engines([Engine(40), Engine(40)], 301.0) == pytest.approx(80 / 16 / 0.8, rel=0.01)
    assert demand.engines([Engine(40, 120_000), Engine(40)], 302.0) == pytest.approx(
        80 / 16 / 0.8 + 2.0, rel=0.01
    )
    assert usual < 1.0


def test_the_highest_need_of_a_while_counts() -> None:
    demand = _known()
    _ask(demand, 8.0, 0.0, 120.0)
    high = demand.engines([Engine()], 120.0)
    _ask(demand, 1.0, 120.0, 290.0)
    assert demand.engines([Engine()], 410.0) == high
    _ask(demand, 1.0, 410.0, 100.0)
    assert demand.engines([Engine()], 510.0) < 0.3 * high


def test_from_zero_and_back() -> None:
    demand = PoolDemand(CONFIG)
    assert demand.engines([], 0.0) == 0.0
    demand.asked(100, None, 5.0)
    # Nobody knows how fast an engine is that has never been there: several gateways want one together.
    assert 0.0 < 10 * demand.engines([], 5.0) <= 1.0
    assert demand.engines([], 600.0) > 0.0
    assert demand.engines([], 605.0) == 0.0
    assert demand.engines([Engine(1)], 606.0) > 0.0
    assert demand.engines([Engine(0)], 607.0) == 0.0
    # After a very long time as well.
    demand.asked(100, None, 10_000_000.0)
    assert demand.engines([], 10_000_000.0) > 0.0


def test_pairs_of_model_and_pool_are_apart() -> None:
    asked: list[tuple[str, str]] = []

    def reporters(model: str, pool: str) -> list[Engine]:
        asked.append((model, pool))
        return []

    demand = EngineDemand(CONFIG, reporters)
    demand.of("m", "").asked(10, None, 0.0)
    demand.of("m", "gold").asked(10, None, 0.0)
    assert demand.asked == [("m", ""), ("m", "gold")]
    assert demand.engines("m", "gold", 1.0) > 0.0
    assert asked == [("m", "gold")]


def test_a_forecast_follows_a_line_and_does_not_fall_below_the_present() -> None:
    rising, falling = CountForecast(), CountForecast()
    for number in range(200):
        rising.add(10.0 + number)
        falling.add(210.0 - number)
    assert rising.ahead(20) == pytest.approx(229.0, rel=0.05)
    assert falling.ahead(20) == falling.level


def test_a_line_of_steps_has_no_negative_part() -> None:
    line = StepLine()
    assert line.answers_s(0.1, 16) == (0, 0.0)
    line.add(4, 0.03)
    assert line.line() == (0.03, 0.0)
    line.add(16, 0.02)
    assert line.line()[1] == 0.0
    steep = StepLine()
    steep.add(1, 0.001)
    steep.add(16, 0.2)
    fixed_s, each_s = steep.line()
    assert fixed_s >= 0.0
    assert math.isclose(fixed_s + each_s * 8.5, 0.1005)
    # A target that no step keeps leaves one answer at a time.
    assert steep.answers_s(0.0001, 16)[0] == 1
