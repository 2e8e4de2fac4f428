"""What a stack adds to its engine's steps is found again from what its clients saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest

from gateway.config import GatewayConfig
from gateway.tiers import Tiers
from runtime.errors import ConfigError
from services.bench.records import RequestRecord
from services.bench.workload import plan
from services.simulate.arrivals import ArrivingRequest
from services.simulate.calibration import calibrating_load, fitted
from services.simulate.fleet import ServedRequest
from services.simulate.step_model import StackCosts
from tests.unit.services.simulate.deployment import scenario, setup

ENGINE = setup()


def _seen(served: ServedRequest) -> RequestRecord:
    """What a client writes down of that request."""
    step_s = served.tpot_s if served.num_tokens > 1 else 0.0
    return RequestRecord(
        index=0,
        tier="",
        prompt_tokens=served.arrival.prompt_tokens,
        status=200,
        start_s=served.arrival.at_s,
        end_s=served.end_s,
        chunk_times_s=[served.first_s + step_s * number for number in range(served.num_tokens)],
        completion_tokens=served.num_tokens,
    )


def _stack(costs: StackCosts) -> tuple[Sequence[RequestRecord], GatewayConfig, Tiers]:
    """Clients of a stack that adds so much, under the load that calibrates."""
    load = [
        ArrivingRequest(
            each.start_s, each.prompt_tokens, int(msgspec.json.decode(each.body)["max_tokens"]), "standard"
        )
        for each in plan(calibrating_load(ENGINE), "model")
    ]
    there = scenario(load, msgspec.structs.replace(ENGINE, stack_costs=costs))
    return [_seen(each) for each in there.served(1, 0).served], there.config, there.tiers


@pytest.mark.parametrize(("slowdown", "front_s"), [(1.0, 0.0), (1.4, 0.012), (0.8, 0.003)])
def test_a_stacks_costs_are_found_again(slowdown: float, front_s: float) -> None:
    records, config, tiers = _stack(StackCosts((slowdown,), (front_s,)))
    found = fitted(records, ENGINE, config, tiers)
    assert found.for_seed(0) == pytest.approx((slowdown, front_s), rel=0.02, abs=0.0005)
    # Another seed is another draw of the same requests.
    assert found.for_seed(3) == found.for_seed(3)
    assert found.for_seed(3) == pytest.approx((slowdown, front_s), rel=0.05, abs=0.001)


def test_a_simulated_first_token_comes_as_much_later_as_the_front_takes() -> None:
    plain, later = (
        scenario(
            [ArrivingRequest(0.0, 100, 5, "standard")], msgspec.structs.replace(ENGINE, stack_costs=costs)
        )
        for costs in (StackCosts(), StackCosts((1.0,), (0.25,)))
    )
    first, second = plain.run(1, 0).total, later.run(1, 0).total
    assert second.ttft_p50_s == pytest.approx(first.ttft_p50_s + 0.25)
    assert second.tpot_p50_s == pytest.approx(first.tpot_p50_s)


def _slow(record: RequestRecord) -> RequestRecord:
    times = [record.chunk_times_s[0] + 1000.0 * number for number in range(len(record.chunk_times_s))]
    return msgspec.structs.replace(record, chunk_times_s=times)


def _short(record: RequestRecord) -> RequestRecord:
    return msgspec.structs.replace(record, chunk_times_s=record.chunk_times_s[:1], completion_tokens=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [(_slow, "times as long as --steps says"), (_short, "no request was answered with two tokens")],
)
def test_what_no_stack_of_that_engine_does_is_refused(
    change: Callable[[RequestRecord], RequestRecord], message: str
) -> None:
    records, config, tiers = _stack(StackCosts())
    with pytest.raises(ConfigError, match=message):
        fitted([change(each) for each in records], ENGINE, config, tiers)
