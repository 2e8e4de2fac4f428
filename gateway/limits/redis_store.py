"""Counters in Redis, shared by all gateway processes. Each charge is one script, so it is atomic there.

One Redis, with or without replicas, is meant; the keys of one charge may lie in different slots of a Redis
Cluster, which refuses such scripts. What a script did is recorded under its operation's id until this process
has its answer: a charge or a correction whose answer is lost can be repeated, or taken back, exactly.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.limits.store import (
    BUCKET_MS,
    NUM_BUCKETS,
    Demand,
    Granted,
    Kind,
    LeaseReturn,
    LimitRefused,
    Settlement,
    StoreLostError,
    reversal,
)

# Meters are named after their month and not needed after it; kept longer for whoever looks back.
_METER_TTL_S = 70 * 24 * 3600
_KINDS = {1: Kind.WINDOW, 2: Kind.LEASE, 3: Kind.METER}
_PREFIX = "millrace:"
# Records without an answer outlive any time for which a store is away and still has its data. One without a
# living gateway to repeat it is needed by nobody.
_RECORD_TTL_S = 24 * 3600
# Records that one script drops besides its own work.
_NUM_DROPPED = 4
# A time-out is made of so many waits, and passes only as fast as the event loop looks at its sockets between
# them: while it, or the whole process, stands still, nothing is held against the store.
_NUM_WAITS = 10
# Longest time to open or close a connection that a caller waits for no longer.
_CONNECT_TIMEOUT_S = 10.0


class RedisLimitStore:
    """LimitStore on one Redis. Every failure of the connection or the server is a StoreLostError."""

    is_immediate = False

    def __init__(self, url: str, *, lease_ttl_s: float, timeout_s: float, max_connections: int = 64) -> None:
        self._lease_ttl_ms = round(lease_ttl_s * 1000)
        self._timeout_s = timeout_s
        # Retries are made by whoever keeps the operation's id, and time-outs by `_answered`.
        pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=None,
            socket_timeout=None,
            socket_connect_timeout=max(timeout_s, _CONNECT_TIMEOUT_S),
            retry=Retry(NoBackoff(), 0),
        )
        self._client = redis.Redis(connection_pool=pool)
        self._acquire = self._client.register_script(_script("once.lua", "window.lua", "acquire.lua"))
        self._settle = self._client.register_script(_script("once.lua", "window.lua", "settle.lua"))
        self._raise = self._client.register_script(_script("raise.lua"))
        # Records of operations whose answers have come.
        self._answered_records: deque[str] = deque()
        # Operations that were sent and not answered: their records stay.
        self._unclear: set[str] = set()

    async def acquire(self, demand: Demand) -> Granted | LimitRefused:
        return await self._charge(demand, is_taken_back=False)

    async def take_back(self, demand: Demand) -> None:
        """Undoes a charge of which nobody knows whether it was made; arriving after this, it is not made."""
        outcome = await self._charge(demand, is_taken_back=True)
        if isinstance(outcome, Granted):
            await self.settle(reversal(demand, outcome))

    async def _charge(self, demand: Demand, *, is_taken_back: bool) -> Granted | LimitRefused:
        keys = [_PREFIX + window for window in demand.counted]
        arguments: list[Any] = [
            *(BUCKET_MS, NUM_BUCKETS, self._lease_ttl_ms, _METER_TTL_S),
            *(len(demand.windows), len(demand.leases), len(demand.meters), int(is_taken_back)),
            *(len(demand.counted), demand.age_ms),
        ]
        for window in demand.windows:
            keys.append(_PREFIX + window.key)
            arguments += (window.limit, window.amount)
        for lease in demand.leases:
            keys.append(_PREFIX + lease.key)
            arguments += (lease.limit, lease.lease_id, lease.slots)
        for meter in demand.meters:
            keys.append(_PREFIX + meter.key)
            arguments += (meter.limit, meter.base, meter.unit_cost, meter.units)
        answer = await self._once(demand.operation, self._acquire, keys, arguments)
        if answer[0] == 0:
            _, kind, index, used, wait_ms = answer
            return LimitRefused(_KINDS[kind], index, used, None if wait_ms < 0 else wait_ms)
        sums = answer[2 : 2 + len(demand.windows)]
        meters = answer[2 + len(demand.windows) :]
        units, totals = meters[: len(demand.meters)], meters[len(demand.meters) :]
        return Granted(answer[1], tuple(sums), tuple(units), tuple(totals))

    async def settle(self, settlement: Settlement) -> None:
        keys: list[str] = []
        arguments: list[Any] = [
            *(BUCKET_MS, NUM_BUCKETS, _METER_TTL_S),
            *(len(settlement.windows), len(settlement.leases), len(settlement.meters)),
        ]
        for window in settlement.windows:
            keys.append(_PREFIX + window.key)
            arguments += (window.bucket, window.delta)
        for lease in settlement.leases:
            keys.append(_PREFIX + lease.key)
            arguments += (lease.lease_id, lease.slots)
        for meter in settlement.meters:
            keys.append(_PREFIX + meter.key)
            arguments.append(meter.delta)
        await self._once(settlement.operation, self._settle, keys, arguments)

    async def raise_meters(self, sums: Mapping[str, int]) -> None:
        keys = [_PREFIX + key for key in sums]
        async with self._answered():
            await self._raise(keys=keys, args=[_METER_TTL_S, *sums.values()])

    async def renew(self, leases: tuple[LeaseReturn, ...]) -> None:
        async with self._answered():
            seconds, microseconds = await self._client.time()
            expiry = seconds * 1000 + microseconds // 1000 + self._lease_ttl_ms
            async with self._client.pipeline(transaction=False) as pipeline:
                for lease in leases:
                    pipeline.zadd(_PREFIX + lease.key, dict.fromkeys(_slots(lease), expiry), xx=True)
                    pipeline.pexpire(_PREFIX + lease.key, self._lease_ttl_ms)
                await pipeline.execute()

    async def ping(self) -> None:
        """Raises StoreLostError unless Redis answers."""
        async with self._answered():
            await self._client.ping()

    async def close(self) -> None:
        await self._client.aclose()
        await self._client.connection_pool.disconnect()

    async def _once(self, operation: str, script: Any, keys: list[str], arguments: list[Any]) -> Any:
        record = f"{_PREFIX}operation:{operation}"
        waiting = self._answered_records
        dropped = [waiting.popleft() for _ in range(min(_NUM_DROPPED, len(waiting)))]
        try:
            async with self._answered():
                answer = await script(
                    keys=[record, *keys, *dropped], args=[_RECORD_TTL_S, len(dropped), *arguments]
                )
        except (StoreLostError, asyncio.CancelledError):
            self._unclear.add(operation)
            waiting.extend(dropped)
            raise
        if operation in self._unclear:
            # Its first sending may arrive yet.
            self._unclear.discard(operation)
        else:
            waiting.append(record)
        return answer

    @asynccontextmanager
    async def _answered(self) -> AsyncIterator[None]:
        """Around calls of Redis: every failure, and no answer within the time-out, is a StoreLostError."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None

        def wait(waits_left: int) -> None:
            nonlocal timer
            if waits_left:
                timer = loop.call_later(self._timeout_s / _NUM_WAITS, wait, waits_left - 1)
            else:
                limit.reschedule(loop.time())

        try:
            async with asyncio.timeout(None) as limit:
                wait(_NUM_WAITS)
                yield
        except (RedisError, OSError) as error:
            raise await self._lost(error) from error
        finally:
            if timer is not None:
                timer.cancel()

    async def _lost(self, error: Exception) -> StoreLostError:
        # Idle connections to a server that went away would each fail once more.
        await self._client.connection_pool.disconnect(inuse_connections=False)
        return StoreLostError(f"{type(error).__name__}: {error}")


def _slots(lease: LeaseReturn) -> list[str]:
    """Members of a lease's sorted set, as `slot_of` of the scripts names them."""
    return [lease.lease_id, *(f"{lease.lease_id}:{slot}" for slot in range(2, lease.slots + 1))]


def _script(*names: str) -> str:
    folder = resources.files("gateway.limits").joinpath("lua")
    return "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)
