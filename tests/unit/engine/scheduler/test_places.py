"""Places in the batch are shared among equal tenants: branches count, and who holds more gives back."""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engine.types import FinishReason, TokenEvent
from tests.unit.engine.driver import Driver, memory_plan

PLACES = 16
PROMPT = [5, 9, 2, 7, 1, 1, 3, 8]


def driver_for(**options: object) -> Driver:
    settings = {"max_num_seqs": PLACES, "max_num_batched_tokens": 64, **options}
    return Driver(memory=memory_plan(2000, 4, 400), **settings)


def held(driver: Driver) -> dict[str, int]:
    """Places by tenant."""
    return {tenant: count for (_, tenant), count in driver.scheduler._state.shares.slots.items()}


def steps(driver: Driver, count: int) -> None:
    for _ in range(count):
        driver.step()


def computed(driver: Driver, tenant: str) -> int:
    """Tokens sampled for a tenant, also those of choices that are kept until all have ended."""
    groups = driver.scheduler._state.groups.values()
    mine = [each for each in groups if each.request.tenant == tenant]
    return sum(each.num_output_tokens for group in mine for each in group.sequences)


def preemptions(events: list[TokenEvent]) -> int:
    return sum(event.statistics.num_preemptions for event in events if event.statistics)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sampling", [{"n": PLACES}, {"best_of": PLACES}])
@pytest.mark.parametrize("neighbour", [{"n": PLACES}, {}])
def test_many_branches_leave_an_equal_tenant_half_of_the_places(
    sampling: dict[str, int], neighbour: dict[str, int], overlap: bool
) -> None:
    driver = driver_for(overlap=overlap)
    wide = driver.submit(PROMPT, max_tokens=140, tenant="wide", **sampling)
    steps(driver, 20)
    assert held(driver) == {"wide": PLACES}
    first = driver.submit([4, *PROMPT], max_tokens=140, tenant="equal", **neighbour)
    others = [
        driver.submit([each, *PROMPT], max_tokens=140, tenant="equal")
        for each in range(0 if neighbour else PLACES)
    ]
    before = {tenant: computed(driver, tenant) for tenant in ("wide", "equal")}
    steps(driver, 3 if overlap else 2)
    assert driver.tokens(first), "it does not wait for an answer to end"
    steps(driver, 80)
    assert held(driver) == {"wide": PLACES // 2, "equal": PLACES // 2}
    got = {tenant: computed(driver, tenant) - count for tenant, count in before.items()}
    assert got["equal"] == pytest.approx(got["wide"], rel=0.1)
    driver.run()
    driver.check_everything() if "n" in sampling else None
    assert all(driver.finish(each) is FinishReason.LENGTH for each in (wide, first, *others))
    assert preemptions(driver.events[wide]) <= 2 * PLACES


def test_one_request_after_the_other_finds_a_place_though_it_displaces_each_time() -> None:
    driver = driver_for(max_preemptions=2)
    driver.submit(PROMPT, max_tokens=300, n=PLACES, tenant="wide")
    steps(driver, 10)
    for index in range(40):
        single = driver.submit([index, *PROMPT], max_tokens=3, tenant="equal")
        steps(driver, 5)
        assert driver.finish(single) is FinishReason.LENGTH
    driver.run()
    driver.check_everything()


def test_a_heavier_tenant_has_more_places() -> None:
    driver = driver_for()
    driver.submit(PROMPT, max_tokens=300, n=PLACES, tenant="light")
    steps(driver, 5)
    driver.submit([4, *PROMPT], max_tokens=300, n=PLACES, tenant="heavy", weight=3.0)
    steps(driver, 30)
    assert held(driver) == {"light": 4, "heavy": 12}


def test_whoever_holds_most_gives_first() -> None:
    driver = driver_for(fairness_band_tokens=100_000)
    driver.submit(PROMPT, max_tokens=300, n=12, tenant="most")
    driver.submit([3, *PROMPT], max_tokens=300, n=4, tenant="some")
    steps(driver, 5)
    driver.submit([4, *PROMPT], max_tokens=300, n=4, tenant="new")
    steps(driver, 10)
    assert held(driver) == {"most": 8, "some": 4, "new": 4}


@pytest.mark.parametrize("priority", [0, 5])
def test_a_beam_makes_room_for_an_equal_tenant_and_for_a_higher_tier(priority: int) -> None:
    driver = driver_for(max_num_seqs=6)
    search = driver.submit(PROMPT, max_tokens=60, n=6, beam_width=6, tenant="wide")
    steps(driver, 5)
    assert held(driver) == {"wide": 6}
    single = driver.submit([4, *PROMPT], max_tokens=20, tenant="equal", priority=priority)
    steps(driver, 2)
    assert held(driver) == {"wide": 5, "equal": 1}
    driver.run()
    assert driver.tokens(single) == driver.expected(single)
    assert all(driver.finish(search, place) is FinishReason.LENGTH for place in range(6))


def test_one_stream_beside_hundreds_earns_no_credit() -> None:
    driver = driver_for(fairness_band_tokens=64)
    driver.submit([7, *PROMPT], max_tokens=390, tenant="patient")
    crowd = [driver.submit([each, *PROMPT], max_tokens=390, tenant="crowd") for each in range(PLACES)]
    steps(driver, 200)
    driver.submit([9, *PROMPT], max_tokens=200, n=PLACES, tenant="patient")
    steps(driver, 20)
    assert held(driver)["crowd"] >= PLACES // 2 - 1
    assert all(driver.tokens(each) for each in crowd[: PLACES // 2 - 1])


@settings(max_examples=40, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    seed=st.integers(0, 1 << 30),
    overlap=st.booleans(),
    num_blocks=st.sampled_from((40, 80)),
    num_places=st.sampled_from((3, 6)),
)
def test_tenants_of_all_widths_displace_one_another_and_everybody_ends(
    seed: int, overlap: bool, num_blocks: int, num_places: int
) -> None:
    rng = random.Random(seed)
    driver = Driver(
        memory=memory_plan(num_blocks, 4, 48),
        overlap=overlap,
        max_num_seqs=num_places,
        fairness_band_tokens=rng.choice((8, 64)),
    )
    searches = set()
    for _ in range(12):
        width = rng.choice((0, 0, 2, 3))
        request = driver.submit(
            [rng.randrange(99) for _ in range(rng.randrange(1, 14))],
            max_tokens=24,
            n=width or rng.choice((1, 1, 4)),
            beam_width=width,
            priority=rng.randrange(2),
            tenant=rng.choice("abc"),
            weight=rng.choice((1.0, 2.0)),
        )
        if width:
            searches.add(request)
        steps(driver, rng.randrange(6))
    driver.run(20_000)
    for request_id, request in driver.requests.items():
        for choice in range(request.sampling.n):
            assert driver.finish(request_id, choice) is FinishReason.LENGTH
            if request_id not in searches:
                assert driver.tokens(request_id, choice) == driver.expected(request_id, choice)
    assert driver.scheduler.num_unreferenced_blocks == num_blocks
    assert driver.runner.num_states() == 0
