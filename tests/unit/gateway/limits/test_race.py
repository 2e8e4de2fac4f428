"""Several processes and many tasks against one real Redis: exactly the limit is admitted, never one more."""

from __future__ import annotations

import asyncio
import multiprocessing
from typing import Any

from gateway.limits.redis_store import RedisLimitStore
from gateway.limits.store import (
    Demand,
    Granted,
    LeaseDemand,
    MeterDemand,
    Settlement,
    WindowChange,
    WindowDemand,
)
from tests.redis_server import RedisServer

PROCESSES = 3
TASKS = 8
WINDOW_LIMIT = 1000
SLOTS = 10
METER_LIMIT = 1503


async def _race(url: str, name: str, barrier: Any) -> tuple[int, int, int]:
    store = RedisLimitStore(url, lease_ttl_s=60, timeout_s=30)
    await store.ping()
    barrier.wait()

    async def fill(number: int) -> tuple[int, int, int]:
        admitted = slots = units = 0
        for attempt in range(30):
            amount = 1 + (number + attempt) % 7
            outcome = await store.acquire(Demand(windows=(WindowDemand("w", WINDOW_LIMIT, amount),)))
            if isinstance(outcome, Granted):
                # A third of it is given back, for others to take.
                spare = amount // 3
                change = WindowChange("w", outcome.bucket, -spare)
                await store.settle(Settlement(windows=(change,)))
                admitted += amount - spare
            # Some want several at once, and the last tasks to be done one alone.
            num_slots = 1 + number % 3
            lease = LeaseDemand("l", SLOTS, f"{name}-{number}-{attempt}", num_slots)
            if isinstance(await store.acquire(Demand(leases=(lease,))), Granted):
                slots += num_slots
            charge = await store.acquire(Demand(meters=(MeterDemand("m", METER_LIMIT, 0, 1, amount),)))
            units += charge.meter_units[0] if isinstance(charge, Granted) else 0
        return admitted, slots, units

    sums = await asyncio.gather(*(fill(number) for number in range(TASKS)))
    await store.close()
    return tuple(sum(column) for column in zip(*sums, strict=True))  # type: ignore[return-value]


def _process(url: str, name: str, barrier: Any, answers: Any) -> None:
    answers.put(asyncio.run(_race(url, name, barrier)))


def test_exactly_the_limit_is_admitted(own_redis: RedisServer) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(PROCESSES), context.Queue()
    processes = [
        context.Process(target=_process, args=(own_redis.url, str(number), barrier, answers))
        for number in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    admitted, slots, units = (sum(column) for column in zip(*(answers.get() for _ in processes), strict=True))
    for process in processes:
        process.join()
    # More was asked for than the limits, by far; nothing is taken twice and nothing is left over that a
    # demand would have fitted into.
    assert WINDOW_LIMIT - 7 < admitted <= WINDOW_LIMIT
    assert slots == SLOTS
    assert units == METER_LIMIT
