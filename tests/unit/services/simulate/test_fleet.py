"""A fleet in virtual time: skipping changes nothing, and nothing is lost with a zone."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from services.simulate.arrivals import ArrivingRequest, Burst
from services.simulate.fleet import FleetPlan, ServedRequest, VirtualFleet
from services.simulate.scenario import Scenario, ZoneLoss
from tests.unit.services.simulate.deployment import load, scenario, setup


def _told(served: ServedRequest) -> tuple[Any, ...]:
    """All that a client saw of one request; nan equals itself as text."""
    seen = (served.first_s, served.last_s, served.end_s, served.gap_s)
    return (*map(repr, seen), served.num_tokens, served.failure, served.num_losses, served.tier.name)


def _all(fleet: VirtualFleet) -> list[Any]:
    return [
        *map(_told, fleet.served),
        *((repr(node.busy_s), repr(node.held_s)) for node in fleet.nodes),
        *(
            (each.target, sorted(gateway.fleet._prefixes[each.target]._held), each.load)
            for gateway in fleet.gateways
            for each in gateway.fleet.attachments
        ),
    ]


SCENARIOS = {
    "one engine": (scenario(load(3.0)), 1),
    "overload of small batches": (scenario(load(30.0, 10.0), setup(max_num_seqs=6, max_waiting=40)), 2),
    "pressure on the cache": (
        scenario(
            load(12.0, 12.0),
            msgspec.structs.replace(
                setup(), memory=msgspec.structs.replace(setup().memory, num_blocks=260, max_model_len=4000)
            ),
        ),
        1,
    ),
    "a zone dies and returns": (
        scenario(
            load(12.0, 15.0),
            msgspec.structs.replace(setup(), load_s=2.0),
            fleet=FleetPlan(num_engines=1, num_zones=2, num_gateways=2),
            zone_loss=ZoneLoss(5.0, 2.0),
        ),
        4,
    ),
    "a burst on subsets": (
        scenario(
            load(10.0, 12.0),
            fleet=FleetPlan(num_engines=1, num_gateways=3, subset=2),
            burst=Burst(4.0, 3.0, 4.0),
        ),
        4,
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("seed", [0, 1])
def test_skipping_changes_nothing(name: str, seed: int) -> None:
    asked, num_engines = SCENARIOS[name]
    noisy = msgspec.structs.replace(
        asked.setup, model=asked.setup.model._replace(noise=(0.9, 1.0, 1.05, 1.3))
    )
    asked = msgspec.structs.replace(asked, setup=noisy)
    skipping = asked.served(num_engines, seed)
    plain = msgspec.structs.replace(asked, skips=False).served(num_engines, seed)
    assert _all(skipping) == _all(plain)


def test_skipped_steps_leave_the_scheduler_as_steps_would() -> None:
    asked, num_engines = SCENARIOS["pressure on the cache"]
    fleets = [msgspec.structs.replace(asked, skips=each).served(num_engines, 3) for each in (True, False)]
    states = []
    for fleet in fleets:
        engine = fleet.nodes[0]._engine
        assert engine is not None
        engine.scheduler.check_invariants()
        state = engine.scheduler._state
        rate = state.speed
        states.append(
            (
                repr(vars(rate.time._decode)),
                repr((rate.step_s, rate.decode_tokens_per_s, rate.answer_tokens)),
                state.shares._counters,
                list(state.cache._pool._idle),
                state.cache._pool._free,
                engine.scheduler._planner._next_step_id,
            )
        )
    assert states[0] == states[1]


def test_every_arrival_ends_once() -> None:
    for asked, num_engines in SCENARIOS.values():
        fleet = asked.served(num_engines, 2)
        assert len(fleet.served) == len(asked.arrivals(2))
        assert fleet.num_open == 0
        assert all(not math.isnan(each.end_s) for each in fleet.served)
        for each in fleet.served:
            assert each.failure or each.num_tokens == each.arrival.output_tokens


def test_a_lost_zone_costs_time_and_no_token() -> None:
    fleet = SCENARIOS["a zone dies and returns"][0].served(4, 0)
    continued = [each for each in fleet.served if each.num_losses]
    assert continued
    assert all(not each.failure for each in continued)
    assert all(each.num_tokens == each.arrival.output_tokens for each in continued)


def test_without_another_engine_streams_wait_as_long_as_is_configured() -> None:
    arrivals = [ArrivingRequest(0.0, 50, 2000)]
    alone = scenario(arrivals, zone_loss=ZoneLoss(1.0))
    served = alone.served(1, 0).served[0]
    assert served.failure == "ENGINE_LOST"
    assert served.end_s == pytest.approx(1.0 + alone.config.routing.continuation_wait_s)
    late = msgspec.structs.replace(
        alone, zone_loss=ZoneLoss(1.0, 0.5), setup=msgspec.structs.replace(alone.setup, load_s=2.0)
    )
    served = late.served(1, 0).served[0]
    assert (served.failure, served.num_tokens) == ("", 2000)
    assert served.gap_s > 2.5


def test_doors_refuse_who_would_be_late_and_keep_who_is_accepted() -> None:
    what = load(40.0, 8.0, tiers={"interactive": 0.5, "standard": 0.5})
    figures = scenario(what, setup(max_num_seqs=4)).run(1, 0)
    assert figures.failures.keys() == {"QUEUE_LIMIT_EXCEEDED"}
    guaranteed = figures.tiers["interactive"]
    assert 0 < guaranteed.num_refused == figures.failures["QUEUE_LIMIT_EXCEEDED"]
    assert guaranteed.ttft_p50_s < 0.3 < figures.tiers["standard"].ttft_p50_s


def test_prompts_that_share_hash_ids_are_found_in_the_cache() -> None:
    first = ArrivingRequest(0.0, 1600, 4, hash_ids=(1, 2, 3))
    again = ArrivingRequest(5.0, 1700, 4, hash_ids=(1, 2, 9))
    other = ArrivingRequest(10.0, 1700, 4, hash_ids=(7, 2, 3))
    fleet = scenario([first, again, other], setup()).served(3, 0)
    ttfts = [each.ttft_s for each in fleet.served]
    assert ttfts[1] < 0.7 * ttfts[0] < ttfts[2]


def _keeps(asked: Scenario, num_engines: int, seeds: range) -> bool:
    return all(asked.run(num_engines, seed).total.goodput >= 0.9 for seed in seeds)


def test_the_search_finds_the_least_number_of_engines() -> None:
    asked = scenario(load(40.0, 6.0), setup(max_num_seqs=8))
    seeds, tried = range(2), list[int]()
    found, runs = asked.smallest(list(seeds), 0.9, 64, lambda count, worst: tried.append(count))
    assert found is not None
    assert found > 1
    assert _keeps(asked, found, seeds)
    assert not _keeps(asked, found - 1, seeds)
    assert [run.total.goodput for run in runs] == [asked.run(found, seed).total.goodput for seed in seeds]
    assert len(tried) < found + 3
    assert asked.smallest([0], 0.9, found - 1, lambda count, worst: None) == (None, [])


def test_subsets_share_engines_evenly() -> None:
    asked = scenario(load(1.0, 1.0), fleet=FleetPlan(num_engines=1, num_gateways=6, subset=4))
    fleet = asked.served(8, 0)
    assert {len(each.fleet.attachments) for each in fleet.gateways} == {4}
    assert {len(node.attachments) for node in fleet.nodes} == {3}
