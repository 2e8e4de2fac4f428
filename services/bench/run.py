"""Runs a workload against a target, closed or open loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence

from runtime.errors import ConfigError
from services.bench.client import REQUEST_LIMIT_S, BenchTarget, Client
from services.bench.records import RequestRecord
from services.bench.workload import PlannedRequest, Workload, plan

# Called with the record of every request that ended.
OnProgress = Callable[[RequestRecord], None]
_Send = Callable[[PlannedRequest], Coroutine[None, None, None]]


async def run_workload(
    target: BenchTarget,
    workload: Workload,
    model: str,
    *,
    num_warmup: int = 0,
    limit_s: float = REQUEST_LIMIT_S,
    on_progress: OnProgress,
) -> tuple[list[RequestRecord], float]:
    """Records in the order of the plan, and the run's duration in seconds.

    The first `num_warmup` requests are sent once before, and not counted. Each may take `limit_s` seconds.
    """
    client = Client(target, limit_s=limit_s)
    requests = plan(workload, model)
    records: dict[int, RequestRecord] = {}

    async def send(request: PlannedRequest) -> None:
        records[request.index] = record = await client.run(request)
        if workload.arrivals.open_loop:
            record.late_s = record.start_s - (started + request.start_s)
        on_progress(record)

    try:
        for request in requests[:num_warmup]:
            await client.run(request)
        started = time.perf_counter()
        if workload.arrivals.open_loop:
            await _open_loop(send, requests, started)
        else:
            await _closed_loop(send, requests, workload.arrivals.concurrency)
        return [records[request.index] for request in requests], time.perf_counter() - started
    finally:
        await client.close()


async def choose_model(target: BenchTarget, wanted: str) -> str:
    """`wanted`, or the first model that the server lists; raises ConfigError when it lists none."""
    if wanted:
        return wanted
    models = await Client(target).models()
    if not models:
        raise ConfigError("GET /v1/models lists no model; name one with --model")
    return models[0]


async def _closed_loop(send: _Send, requests: Sequence[PlannedRequest], concurrency: int) -> None:
    queue = iter(requests)

    async def work() -> None:
        for request in queue:
            await send(request)

    await asyncio.gather(*(work() for _ in range(concurrency)))


async def _open_loop(send: _Send, requests: Sequence[PlannedRequest], started: float) -> None:
    # Whoever cancels the run, as a sweep does that has seen enough, leaves no request under way.
    async with asyncio.TaskGroup() as group:
        for request in requests:
            await asyncio.sleep(max(0.0, started + request.start_s - time.perf_counter()))
            group.create_task(send(request))
