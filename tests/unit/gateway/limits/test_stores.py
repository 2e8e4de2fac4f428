"""Both stores by the same tests; Redis is the real one, started for these tests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
import redis as sync_redis

from gateway.limits.redis_store import RedisLimitStore
from gateway.limits.store import (
    WINDOW_MS,
    Demand,
    Granted,
    Kind,
    LeaseDemand,
    LeaseReturn,
    LimitRefused,
    LimitStore,
    MemoryLimitStore,
    MeterChange,
    MeterDemand,
    Settlement,
    WindowChange,
    WindowDemand,
)

# Redis has a clock of its own: leases outlive any test but the one that waits for their end.
LEASE_TTL_S = 600.0
SHORT_LEASE_TTL_S = 1.5


@pytest_asyncio.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[LimitStore]:
    async with opened(request, LEASE_TTL_S) as store:
        yield store


@pytest_asyncio.fixture(params=["memory", "redis"])
async def short_lived(request: pytest.FixtureRequest) -> AsyncIterator[LimitStore]:
    async with opened(request, SHORT_LEASE_TTL_S) as store:
        yield store


@asynccontextmanager
async def opened(request: pytest.FixtureRequest, lease_ttl_s: float) -> AsyncIterator[LimitStore]:
    if request.param == "memory":
        yield MemoryLimitStore(lease_ttl_s=lease_ttl_s)
        return
    url = request.getfixturevalue("redis_server").url
    with sync_redis.Redis.from_url(url) as client:
        client.flushall()
    store = RedisLimitStore(url, lease_ttl_s=lease_ttl_s, timeout_s=60)
    yield store
    await store.close()


def window(amount: int, limit: int = 10, key: str = "w") -> Demand:
    return Demand(windows=(WindowDemand(key, limit, amount),))


def meter(units: int, *, limit: int = 100, base: int = 10, unit_cost: int = 2) -> Demand:
    return Demand(meters=(MeterDemand("m", limit, base, unit_cost, units),))


def lease(lease_id: str, limit: int = 2, slots: int = 1) -> Demand:
    return Demand(leases=(LeaseDemand("l", limit, lease_id, slots),))


async def granted(store: LimitStore, demand: Demand) -> Granted:
    outcome = await store.acquire(demand)
    assert isinstance(outcome, Granted)
    return outcome


async def refused(store: LimitStore, demand: Demand) -> LimitRefused:
    outcome = await store.acquire(demand)
    assert isinstance(outcome, LimitRefused)
    return outcome


async def test_a_refused_lease_gives_back_that_the_request_was_counted(store: LimitStore) -> None:
    await granted(store, lease("a", limit=1))
    await granted(store, window(1))
    for _ in range(20):
        await granted(store, window(1, limit=2))
        waiting = Demand(leases=(LeaseDemand("l", 1, "b"),), counted=("w",), age_ms=60_000)
        outcome = await refused(store, waiting)
        assert (outcome.kind, outcome.used) == (Kind.LEASE, 1)
    assert (await granted(store, window(0))).window_sums == (1,)


async def test_what_was_counted_before_the_request_came_is_not_given_back(store: LimitStore) -> None:
    await granted(store, lease("a", limit=1))
    charged = await granted(store, window(1))
    while (await granted(store, window(0))).bucket == charged.bucket:
        await asyncio.sleep(0)
    await refused(store, Demand(leases=(LeaseDemand("l", 1, "b"),), counted=("w",), age_ms=0))
    assert (await granted(store, window(0))).window_sums == (1,)


async def test_window_is_filled_and_then_refuses(store: LimitStore) -> None:
    assert (await granted(store, window(7))).window_sums == (7,)
    assert (await granted(store, window(3))).window_sums == (10,)
    outcome = await refused(store, window(1))
    assert (outcome.kind, outcome.index, outcome.used) == (Kind.WINDOW, 0, 10)
    assert outcome.retry_after_ms is not None
    assert WINDOW_MS - 5_000 < outcome.retry_after_ms <= WINDOW_MS + 500


async def test_amount_beyond_the_limit_never_fits(store: LimitStore) -> None:
    assert (await refused(store, window(11))).retry_after_ms is None


async def test_given_back_room_is_room(store: LimitStore) -> None:
    first = await granted(store, window(10))
    await store.settle(Settlement(windows=(WindowChange("w", first.bucket, -4),)))
    assert (await granted(store, window(4))).window_sums == (10,)


async def test_no_more_is_given_back_than_was_charged(store: LimitStore) -> None:
    first = await granted(store, window(4))
    await store.settle(Settlement(windows=(WindowChange("w", first.bucket, -9),)))
    await store.settle(Settlement(windows=(WindowChange("w", first.bucket - 10_000, -9),)))
    assert (await granted(store, window(10))).window_sums == (10,)


async def test_added_later_counts_even_beyond_the_limit(store: LimitStore) -> None:
    first = await granted(store, window(8))
    await store.settle(Settlement(windows=(WindowChange("w", first.bucket, 5),)))
    assert (await refused(store, window(1))).used == 13


async def test_all_or_nothing(store: LimitStore) -> None:
    await granted(store, lease("a", limit=1))
    both = Demand(windows=(WindowDemand("w", 10, 6),), leases=(LeaseDemand("l", 1, "b"),))
    outcome = await refused(store, both)
    assert (outcome.kind, outcome.index) == (Kind.LEASE, 0)
    assert (await granted(store, window(10))).window_sums == (10,)


async def test_second_counter_of_a_kind_is_named(store: LimitStore) -> None:
    await granted(store, window(10, key="full"))
    outcome = await refused(store, Demand(windows=(WindowDemand("w", 5, 1), WindowDemand("full", 10, 1))))
    assert outcome.index == 1


async def test_lease_is_free_again_when_returned(store: LimitStore) -> None:
    await granted(store, lease("a"))
    await granted(store, lease("b"))
    assert (await refused(store, lease("c"))).used == 2
    await store.settle(Settlement(leases=(LeaseReturn("l", "a"),)))
    await granted(store, lease("c"))


async def test_lease_takes_all_of_its_slots_or_none(store: LimitStore) -> None:
    await granted(store, lease("a", limit=5, slots=3))
    assert (await refused(store, lease("b", limit=5, slots=3))).used == 3
    await granted(store, lease("c", limit=5, slots=2))
    assert (await refused(store, lease("d", limit=5))).used == 5
    await store.renew((LeaseReturn("l", "a", 3),))
    await store.settle(Settlement(leases=(LeaseReturn("l", "a", 3),)))
    assert (await refused(store, lease("e", limit=5, slots=4))).used == 2
    await granted(store, lease("f", limit=5, slots=3))


async def test_repeated_returns_of_many_slots_free_no_others(store: LimitStore) -> None:
    await granted(store, lease("a", limit=6, slots=3))
    await granted(store, lease("b", limit=6, slots=3))
    for _ in range(2):
        await store.settle(Settlement(leases=(LeaseReturn("l", "a", 3),)))
    assert (await refused(store, lease("c", limit=6, slots=4))).used == 3


async def test_all_slots_of_a_lease_lapse_unless_renewed(short_lived: LimitStore) -> None:
    await granted(short_lived, lease("dead", limit=5, slots=2))
    await granted(short_lived, lease("alive", limit=5, slots=3))
    # Renewed until the other has lapsed, which would have come first for both.
    while isinstance(await short_lived.acquire(lease("c", limit=5, slots=2)), LimitRefused):
        await asyncio.sleep(SHORT_LEASE_TTL_S / 50)
        await short_lived.renew((LeaseReturn("l", "alive", 3),))
    assert (await refused(short_lived, lease("d", limit=5))).used == 5


async def test_many_leases_at_once_never_pass_the_limit(store: LimitStore) -> None:
    asked = [lease(str(number), limit=10, slots=1 + number % 4) for number in range(40)]
    outcomes = await asyncio.gather(*(store.acquire(each) for each in asked))
    held = [
        each.leases[0].given_back
        for each, outcome in zip(asked, outcomes, strict=True)
        if isinstance(outcome, Granted)
    ]
    assert sum(each.slots for each in held) == 10
    await store.settle(Settlement(leases=tuple(held)))
    await granted(store, lease("all", limit=10, slots=10))


async def test_lease_lapses_unless_renewed(short_lived: LimitStore) -> None:
    await granted(short_lived, lease("dead"))
    await granted(short_lived, lease("alive"))
    await short_lived.renew((LeaseReturn("l", "alive"),))
    # Renewed until the other has lapsed, which would have come first for both.
    while isinstance(await short_lived.acquire(lease("c")), LimitRefused):
        await asyncio.sleep(SHORT_LEASE_TTL_S / 50)
        await short_lived.renew((LeaseReturn("l", "alive"),))
    assert (await refused(short_lived, lease("d"))).used == 2


async def test_renewal_does_not_bring_a_returned_lease_back(store: LimitStore) -> None:
    await granted(store, lease("a", limit=1))
    await store.settle(Settlement(leases=(LeaseReturn("l", "a"),)))
    await store.renew((LeaseReturn("l", "a"),))
    await granted(store, lease("b", limit=1))


async def test_meter_grants_what_is_left(store: LimitStore) -> None:
    first = await granted(store, meter(20))
    assert (first.meter_units, first.meter_sums) == ((20,), (50,))
    second = await granted(store, meter(30))
    assert (second.meter_units, second.meter_sums) == ((20,), (100,))
    assert (await refused(store, meter(1))).used == 100
    await store.settle(Settlement(meters=(MeterChange("m", -30),)))
    assert (await granted(store, meter(1, base=0))).meter_sums == (72,)


async def test_meter_without_room_for_one_unit_refuses(store: LimitStore) -> None:
    await granted(store, meter(39, base=10))
    assert (await refused(store, meter(5, base=11))).kind is Kind.METER
    assert (await granted(store, meter(0, base=12))).meter_sums == (100,)


async def test_free_units_are_all_granted(store: LimitStore) -> None:
    outcome = await granted(store, meter(1_000_000, unit_cost=0))
    assert (outcome.meter_units, outcome.meter_sums) == ((1_000_000,), (10,))


async def test_many_at_once_never_pass_the_limit(store: LimitStore) -> None:
    outcomes = await asyncio.gather(*(store.acquire(window(3, limit=100)) for _ in range(60)))
    assert sum(isinstance(outcome, Granted) for outcome in outcomes) == 33


async def test_short_windows_slide_in_real_time(store: LimitStore, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket_ms, num_buckets, limit = 10, 6, 40
    for module in ("store", "redis_store"):
        monkeypatch.setattr(f"gateway.limits.{module}.BUCKET_MS", bucket_ms)
        monkeypatch.setattr(f"gateway.limits.{module}.NUM_BUCKETS", num_buckets)
    randomness = random.Random(1)
    # [bucket, amount that stays charged]
    charged: list[tuple[int, int]] = []
    num_refused = 0
    while len(charged) < 150:
        amount = randomness.randrange(1, 20)
        outcome = await store.acquire(window(amount, limit))
        if isinstance(outcome, LimitRefused):
            num_refused += 1
            assert outcome.retry_after_ms is not None
            assert 1 <= outcome.retry_after_ms <= bucket_ms * num_buckets
            await asyncio.sleep(outcome.retry_after_ms / 1000 * randomness.random() * 2)
            continue
        # Nothing, everything or a part is given back, or more is charged.
        change = randomness.choice([0, -amount, -(amount // 2), 3])
        await store.settle(Settlement(windows=(WindowChange("w", outcome.bucket, change),)))
        charged.append((outcome.bucket, amount + min(change, 0)))
    assert num_refused
    for first, _ in charged:
        held = sum(amount for bucket, amount in charged if first <= bucket < first + num_buckets)
        assert held <= limit
