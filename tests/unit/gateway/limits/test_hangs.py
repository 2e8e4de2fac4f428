"""A Redis that stands still and goes on: each charge and each settlement counts once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import redis

from contract.errors import MillraceError
from gateway.auth.directory import KeyDirectory
from gateway.config import LimitsConfig
from gateway.limits.limiter import TokenLimiter
from gateway.limits.prices import Prices
from gateway.limits.redis_store import RedisLimitStore
from gateway.limits.resilient import Policy, ResilientLimitStore
from gateway.limits.store import (
    Demand,
    Granted,
    LimitRefused,
    MemoryLimitStore,
    MeterChange,
    MeterDemand,
    Settlement,
    StoreLostError,
    WindowDemand,
)
from gateway.settings import load_settings
from gateway.types.request import Identity
from tests.redis_server import RedisServer

SETTINGS = load_settings(
    {
        "security": {"context_secret": "a secret of this test"},
        "tenants": {
            "t": {"monthly_tokens": 100_000, "tokens_per_minute": 100_000, "max_concurrent_streams": 100}
        },
    }
)
IDENTITY = Identity(request_id="r", tenant="t", key_id="k", tier="standard")
NUM_STREAMS = 20


class CountedStore(RedisLimitStore):
    """Says what was asked of it, answered or not."""

    num_charges = 0
    num_lost_pings = 0

    async def acquire(self, demand: Demand) -> Granted | LimitRefused:
        self.num_charges += 1
        return await super().acquire(demand)

    async def ping(self) -> None:
        try:
            await super().ping()
        except StoreLostError:
            self.num_lost_pings += 1
            raise


class Rig:
    """Streams of one tenant over a Redis that the test stops."""

    def __init__(self, server: RedisServer, policy: Policy) -> None:
        self.redis = CountedStore(server.url, lease_ttl_s=600, timeout_s=0.1)
        self.store = ResilientLimitStore(
            self.redis,
            MemoryLimitStore(lease_ttl_s=600),
            policy=policy,
            num_gateways=1,
            on_change=lambda is_up: None,
        )
        self.limiter = TokenLimiter(self.store, KeyDirectory(SETTINGS), Prices({}), LimitsConfig())
        self.used = 0
        self._server = server

    async def stream(self, number: int, settled: asyncio.Event) -> None:
        """Reserves, and settles when told to."""
        reservation = await self.limiter.reserve(IDENTITY, 100, 300)
        await settled.wait()
        self.used += 100 + number
        await reservation.settle(100, number)

    async def settled(self) -> None:
        """Returns when the store is back and nothing is unclear any more."""
        await until(lambda: self.store.is_up and not self.store._unclear and not self.store._owed)

    def counted(self) -> tuple[int, int, int]:
        """(meter, window, slots held) as Redis has them."""
        with redis.Redis.from_url(self._server.url) as client:
            (meter,) = client.keys("millrace:tenant:t:tokens:*")
            return (
                int(client.get(meter)),  # type: ignore[arg-type]
                int(client.hget("millrace:tenant:t:tpm", "t")),  # type: ignore[arg-type]
                client.zcard("millrace:tenant:t:streams"),  # type: ignore[return-value]
            )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(server: RedisServer, policy: Policy) -> AsyncIterator[Rig]:
    rig = Rig(server, policy)
    rig.store.start()
    try:
        yield rig
    finally:
        server.wake()
        await rig.store.close()


@pytest.fixture(autouse=True)
def fast_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.limits.resilient._PROBE_INTERVAL_S", 0.05)


@pytest.mark.parametrize("policy", ["closed", "local_share"])
async def test_settlements_that_arrived_unanswered_count_once(own_redis: RedisServer, policy: Policy) -> None:
    async with running(own_redis, policy) as rig:
        end = asyncio.Event()
        streams = [asyncio.create_task(rig.stream(number, end)) for number in range(NUM_STREAMS)]
        await until(lambda: len(rig.limiter._open_leases) == NUM_STREAMS)
        own_redis.hang()
        end.set()
        await asyncio.gather(*streams)
        await until(lambda: not rig.store.is_up)
        own_redis.wake()
        await rig.settled()
        assert rig.counted() == (rig.used, rig.used, 0)


@pytest.mark.parametrize("policy", ["closed", "local_share"])
async def test_a_long_hang_under_load_leaves_what_was_used(own_redis: RedisServer, policy: Policy) -> None:
    """Streams begin, end and are left before, during and after a hang of many time-outs."""
    async with running(own_redis, policy) as rig:
        now, later = asyncio.Event(), asyncio.Event()
        now.set()
        before = [asyncio.create_task(rig.stream(number, later)) for number in range(NUM_STREAMS)]
        await until(lambda: len(rig.limiter._open_leases) == NUM_STREAMS)
        own_redis.hang()
        during = [asyncio.create_task(rig.stream(number, now)) for number in range(NUM_STREAMS)]
        left = [asyncio.create_task(rig.stream(0, now)) for _ in range(3)]
        num_asked = 2 * NUM_STREAMS + len(left)
        await until(lambda: rig.redis.num_charges == num_asked)
        for each in left:
            each.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        outcomes = await asyncio.gather(*during, return_exceptions=True)
        if policy == "closed":
            assert all(isinstance(each, MillraceError) for each in outcomes)
        else:
            assert outcomes == [None] * NUM_STREAMS
        later.set()
        await asyncio.gather(*before)
        num_lost = rig.redis.num_lost_pings
        await until(lambda: rig.redis.num_lost_pings >= num_lost + 2)
        own_redis.wake()
        await rig.settled()
        await rig.stream(7, now)
        meter, _, slots = rig.counted()
        assert (meter, slots) == (rig.used, 0)


async def test_who_leaves_while_being_charged_is_not_charged(own_redis: RedisServer) -> None:
    async with running(own_redis, "closed") as rig:
        settled = asyncio.Event()
        settled.set()
        await rig.stream(5, settled)
        own_redis.hang()
        leaving = asyncio.create_task(rig.stream(5, settled))
        await until(lambda: rig.redis.num_charges == 2)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        own_redis.wake()
        await rig.settled()
        assert rig.counted() == (rig.used, rig.used, 0)


async def test_what_is_repeated_under_its_id_counts_once(own_redis: RedisServer) -> None:
    stores = []

    def sender() -> RedisLimitStore:
        # One that has had no answer yet, and so drops no record.
        stores.append(RedisLimitStore(own_redis.url, lease_ttl_s=600, timeout_s=60))
        return stores[-1]

    demand = Demand(windows=(WindowDemand("w", 100, 10),), meters=(MeterDemand("m", 100, 5, 2, 10),))
    assert await sender().acquire(demand) == await sender().acquire(demand)
    correction = Settlement(meters=(MeterChange("m", -4),))
    await sender().settle(correction)
    await sender().settle(correction)
    with redis.Redis.from_url(own_redis.url) as client:
        assert (client.get("millrace:m"), client.hget("millrace:w", "t")) == (b"21", b"10")
        await sender().take_back(demand)
        await sender().take_back(demand)
        # Less what had been corrected already, and never below nothing.
        assert (client.get("millrace:m"), client.hget("millrace:w", "t")) == (b"0", b"0")
    # Taken back before it came: it is not made any more.
    late = Demand(meters=(MeterDemand("m", 100, 0, 1, 10),))
    await sender().take_back(late)
    assert not isinstance(await sender().acquire(late), Granted)
    for store in stores:
        await store.close()


async def test_records_are_dropped_once_they_are_answered(own_redis: RedisServer) -> None:
    store = RedisLimitStore(own_redis.url, lease_ttl_s=600, timeout_s=60)
    for _ in range(50):
        await store.settle(Settlement(meters=(MeterChange("m", 1),)))
    with redis.Redis.from_url(own_redis.url) as client:
        assert len(client.keys("millrace:operation:*")) == 1
    await store.close()


async def test_a_loop_that_stands_still_is_not_the_stores_silence(own_redis: RedisServer) -> None:
    store = RedisLimitStore(own_redis.url, lease_ttl_s=600, timeout_s=0.2)
    await store.ping()
    for _ in range(3):
        asking = asyncio.create_task(store.acquire(Demand(meters=(MeterDemand("m", 1000, 0, 1, 10),))))
        # The question leaves, and then nobody looks for the answer, for longer than the time-out.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        time.sleep(0.5)  # noqa: ASYNC251
        assert isinstance(await asking, Granted)
    await store.close()
