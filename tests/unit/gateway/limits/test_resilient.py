"""A real Redis is killed and comes back: what the two policies do, and that it is seen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import redis

from gateway.limits.redis_store import RedisLimitStore
from gateway.limits.resilient import Policy, ResilientLimitStore
from gateway.limits.store import (
    Demand,
    Granted,
    Kind,
    LeaseDemand,
    LeaseReturn,
    LimitRefused,
    MemoryLimitStore,
    MeterChange,
    MeterDemand,
    Settlement,
    StoreLostError,
    WindowDemand,
)
from tests.redis_server import RedisServer


class Rig:
    """A store over `server`, and what it said about itself."""

    def __init__(self, server: RedisServer, policy: Policy, num_gateways: int = 2) -> None:
        self.said: list[bool] = []
        self.store = ResilientLimitStore(
            RedisLimitStore(server.url, lease_ttl_s=600, timeout_s=60),
            MemoryLimitStore(lease_ttl_s=600),
            policy=policy,
            num_gateways=num_gateways,
            on_change=self.said.append,
        )
        self.store.start()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def fast_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.limits.resilient._PROBE_INTERVAL_S", 0.02)


def window(amount: int) -> Demand:
    return Demand(windows=(WindowDemand("w", 100, amount),))


async def kind_of(store: ResilientLimitStore, demand: Demand) -> Any:
    outcome = await store.acquire(demand)
    return outcome.kind if isinstance(outcome, LimitRefused) else "granted"


async def test_closed_refuses_until_it_is_back(own_redis: RedisServer) -> None:
    rig = Rig(own_redis, "closed")
    assert await kind_of(rig.store, window(60)) == "granted"
    own_redis.kill()
    for _ in range(3):
        with pytest.raises(StoreLostError):
            await rig.store.acquire(window(1))
    assert rig.said == [True, False]
    own_redis.start()
    await rig.until(lambda: rig.store.is_up)
    assert rig.said == [True, False, True]
    # The scripts are loaded again by themselves.
    assert await kind_of(rig.store, window(60)) == "granted"
    await rig.store.close()


async def test_loss_is_seen_without_any_request(own_redis: RedisServer) -> None:
    rig = Rig(own_redis, "closed")
    own_redis.kill()
    await rig.until(lambda: not rig.store.is_up)
    await rig.store.close()


async def test_local_share_counts_against_a_share_of_every_limit(own_redis: RedisServer) -> None:
    rig = Rig(own_redis, "local_share", num_gateways=4)
    own_redis.kill()
    assert await kind_of(rig.store, window(25)) == "granted"
    assert await kind_of(rig.store, window(1)) is Kind.WINDOW
    slots = [Demand(leases=(LeaseDemand("l", 5, name),)) for name in "abc"]
    assert [await kind_of(rig.store, slot) for slot in slots] == ["granted", "granted", Kind.LEASE]
    await rig.store.settle(Settlement(leases=(LeaseReturn("l", "a"),)))
    assert await kind_of(rig.store, slots[2]) == "granted"
    await rig.store.close()


async def test_lease_taken_alone_is_returned_alone(own_redis: RedisServer) -> None:
    rig = Rig(own_redis, "local_share", num_gateways=1)
    own_redis.kill()
    await rig.store.acquire(Demand(leases=(LeaseDemand("l", 3, "a", 3),)))
    own_redis.start()
    await rig.until(lambda: rig.store.is_up)
    await rig.store.settle(Settlement(leases=(LeaseReturn("l", "a", 3),)))
    own_redis.kill()
    await rig.until(lambda: not rig.store.is_up)
    assert isinstance(await rig.store.acquire(Demand(leases=(LeaseDemand("l", 3, "b", 3),))), Granted)
    await rig.store.close()


async def test_meters_go_on_from_what_was_seen_and_are_paid_back(own_redis: RedisServer) -> None:
    rig = Rig(own_redis, "local_share", num_gateways=2)

    async def charge(units: int) -> Granted | LimitRefused:
        return await rig.store.acquire(Demand(meters=(MeterDemand("m", 100, 0, 1, units),)))

    assert isinstance(await charge(60), Granted)
    own_redis.kill()
    # 40 are left for two gateways.
    outcome = await charge(100)
    assert isinstance(outcome, Granted)
    assert outcome.meter_units == (20,)
    assert isinstance(await charge(1), LimitRefused)
    await rig.store.settle(Settlement(meters=(MeterChange("m", -5),)))
    own_redis.start()
    await rig.until(lambda: rig.store.is_up)
    with redis.Redis.from_url(own_redis.url) as client:
        # This Redis came back empty; what was used meanwhile is in it.
        assert client.get("millrace:m") == b"15"
    await rig.store.close()


class SlowToSettle(RedisLimitStore):
    """Settles when it is told to."""

    def __init__(self, url: str) -> None:
        super().__init__(url, lease_ttl_s=600, timeout_s=60)
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def settle(self, settlement: Settlement) -> None:
        self.asked.set()
        await self.go.wait()
        await super().settle(settlement)


async def test_what_is_charged_while_debts_are_paid_is_paid_too(own_redis: RedisServer) -> None:
    shared, is_up = SlowToSettle(own_redis.url), asyncio.Event()
    store = ResilientLimitStore(
        shared,
        MemoryLimitStore(lease_ttl_s=30),
        policy="local_share",
        num_gateways=1,
        on_change=lambda up: is_up.set() if up else is_up.clear(),
    )
    store.start()

    async def charge(units: int) -> Granted | LimitRefused:
        return await store.acquire(Demand(meters=(MeterDemand("m", 100, 0, 1, units),)))

    own_redis.kill()
    assert isinstance(await charge(10), Granted)
    own_redis.start()
    await shared.asked.wait()
    # The store answers again, and what is owed is on its way.
    assert isinstance(await charge(7), Granted)
    shared.go.set()
    await is_up.wait()
    with redis.Redis.from_url(own_redis.url) as client:
        assert client.get("millrace:m") == b"17"
    await store.close()
