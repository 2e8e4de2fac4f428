"""Counters in Redis, shared by all gateway processes. Each charge is one script, so it is atomic there.

One Redis, with or without replicas, is meant; the keys of one charge may lie in different slots of a Redis
Cluster, which refuses such scripts. A charge whose answer is lost on the way may have been made: a window
forgets it within a minute, a lease lapses, a meter keeps one reservation too much.
"""

from __future__ import annotations

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
    Refused,
    Settlement,
    StoreLostError,
)

# Meters are named after their month and not needed after it; kept longer for whoever looks back.
_METER_TTL_S = 70 * 24 * 3600
_KINDS = {1: Kind.WINDOW, 2: Kind.LEASE, 3: Kind.METER}
_PREFIX = "millrace:"


class RedisLimitStore:
    """LimitStore on one Redis. Every failure of the connection or the server is a StoreLostError."""

    is_immediate = False

    def __init__(self, url: str, *, lease_ttl_s: float, timeout_s: float, max_connections: int = 64) -> None:
        self._lease_ttl_ms = round(lease_ttl_s * 1000)
        # A charge must not be sent twice: no retries below this class.
        pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
        self._client = redis.Redis(connection_pool=pool)
        self._acquire = self._client.register_script(_script("acquire.lua"))
        self._settle = self._client.register_script(_script("settle.lua"))

    async def acquire(self, demand: Demand) -> Granted | Refused:
        keys: list[str] = []
        arguments: list[Any] = [
            *(BUCKET_MS, NUM_BUCKETS, self._lease_ttl_ms, _METER_TTL_S),
            *(len(demand.windows), len(demand.leases), len(demand.meters)),
        ]
        for window in demand.windows:
            keys.append(_PREFIX + window.key)
            arguments += (window.limit, window.amount)
        for lease in demand.leases:
            keys.append(_PREFIX + lease.key)
            arguments += (lease.limit, lease.lease_id)
        for meter in demand.meters:
            keys.append(_PREFIX + meter.key)
            arguments += (meter.limit, meter.base, meter.unit_cost, meter.units)
        answer = await self._run(self._acquire, keys, arguments)
        if answer[0] == 0:
            _, kind, index, used, wait_ms = answer
            return Refused(_KINDS[kind], index, used, None if wait_ms < 0 else wait_ms)
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
            arguments.append(lease.lease_id)
        for meter in settlement.meters:
            keys.append(_PREFIX + meter.key)
            arguments.append(meter.delta)
        await self._run(self._settle, keys, arguments)

    async def renew(self, leases: tuple[LeaseReturn, ...]) -> None:
        try:
            seconds, microseconds = await self._client.time()
            expiry = seconds * 1000 + microseconds // 1000 + self._lease_ttl_ms
            async with self._client.pipeline(transaction=False) as pipeline:
                for lease in leases:
                    pipeline.zadd(_PREFIX + lease.key, {lease.lease_id: expiry}, xx=True)
                    pipeline.pexpire(_PREFIX + lease.key, self._lease_ttl_ms)
                await pipeline.execute()
        except (RedisError, OSError) as error:
            raise await self._lost(error) from error

    async def ping(self) -> None:
        """Raises StoreLostError unless Redis answers."""
        try:
            await self._client.ping()
        except (RedisError, OSError) as error:
            raise await self._lost(error) from error

    async def close(self) -> None:
        await self._client.aclose()
        await self._client.connection_pool.disconnect()

    async def _run(self, script: Any, keys: list[str], arguments: list[Any]) -> Any:
        try:
            return await script(keys=keys, args=arguments)
        except (RedisError, OSError) as error:
            raise await self._lost(error) from error

    async def _lost(self, error: Exception) -> StoreLostError:
        # Idle connections to a server that went away would each fail once more.
        await self._client.connection_pool.disconnect(inuse_connections=False)
        return StoreLostError(f"{type(error).__name__}: {error}")


def _script(name: str) -> str:
    folder = resources.files("gateway.limits").joinpath("lua")
    return "".join(folder.joinpath(part).read_text(encoding="utf-8") for part in ("window.lua", name))
