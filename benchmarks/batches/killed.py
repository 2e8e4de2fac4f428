"""A batch on simulated engines while everything under it is killed in turn."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from itertools import cycle
from typing import Any

import httpx
from sqlalchemy import create_engine, select

from benchmarks.batches.lines import ENDED, begun, read
from benchmarks.stack import RunningStack, running_stack
from gateway.ledger.tables import REQUESTS

NUM_TOKENS = 12
VICTIMS = ("gateway-0", "engine-0", "gateway-1", "tokenizer", "engine-1")
_LIMIT_S = 600.0
_LEDGER_LIMIT_S = 30.0
_POLL_S = 0.05
_CONFIG = """
[supervisor]
restart_delay_s = 0.2
[gateway.batches]
lease_s = 1.0
[engine.simulation]
step_ms = 4.0
"""


def run(num_lines: int, num_kills: int) -> dict[str, Any]:
    """How often each line was answered; `broken` is what was not as it must be."""
    arguments = ("--simulated", "--gateways", "2", "--engines", "2")
    with running_stack(_CONFIG, *arguments) as stack:
        return asyncio.run(_measured(stack, num_lines, num_kills))


async def _measured(stack: RunningStack, num_lines: int, num_kills: int) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {stack.state.api_key}"}
    async with httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=120, trust_env=False) as client:
        path, began_s = await begun(client, stack.state.model, num_lines, NUM_TOKENS), time.monotonic()
        for number, victim in zip(range(1, num_kills + 1), cycle(VICTIMS), strict=False):
            if not await _reached(client, path, number * num_lines // (num_kills + 1)):
                break
            os.kill(stack.pids()[victim], signal.SIGKILL)
        await _reached(client, path, num_lines + 1)
        took_s = time.monotonic() - began_s
        batch = await read(client, path)
        found = [
            json.loads(each)["custom_id"]
            for name in ("output_file_id", "error_file_id")
            if batch[name]
            for each in await _lines(client, batch[name])
        ]
    rows = await _rows(stack, batch["id"], num_lines)
    wanted = {str(each): 1 for each in range(num_lines)}
    broken = {
        "results": sum((Counter(wanted) - Counter(found)).values()) + len(found) - len(set(found)),
        "ledger": abs(num_lines - len(rows)) + len(rows) - len(set(rows)),
        "failed": num_lines - batch["request_counts"]["completed"],
    }
    return {
        "status": batch["status"],
        "lines": num_lines,
        "seconds": round(took_s, 1),
        "lines_per_s": round(num_lines / took_s, 1),
        "kills": num_kills,
        "lines_missing_or_twice": broken["results"],
        "ledger_missing_or_twice": broken["ledger"],
        "lines_failed": broken["failed"],
        "broken": sum(broken.values()),
    }


async def _reached(client: httpx.AsyncClient, path: str, num_lines: int) -> bool:
    """Waits for so many results, or the end; whether it goes on then."""
    ends_s = time.monotonic() + _LIMIT_S
    while time.monotonic() < ends_s:
        batch = await read(client, path)
        if batch["status"] in ENDED:
            return False
        if batch["request_counts"]["completed"] >= num_lines:
            return True
        await asyncio.sleep(_POLL_S)
    raise SystemExit(f"the batch does not go on: {batch}")


async def _lines(client: httpx.AsyncClient, file_id: str) -> list[str]:
    answer = await client.get(f"/v1/files/{file_id}/content")
    answer.raise_for_status()
    return answer.text.splitlines()


async def _rows(stack: RunningStack, batch_id: str, num_lines: int) -> list[str]:
    """Ids of the requests in the ledger, as soon as it has those of all lines."""
    ledger, ends_s = create_engine(stack.ledger_url), time.monotonic() + _LEDGER_LIMIT_S
    query = select(REQUESTS.c.request_id).where(REQUESTS.c.client_request_id == batch_id)
    while True:
        with ledger.connect() as connection:
            rows = list(connection.scalars(query))
        if len(rows) >= num_lines or time.monotonic() > ends_s:
            ledger.dispose()
            return rows
        await asyncio.sleep(_POLL_S)
