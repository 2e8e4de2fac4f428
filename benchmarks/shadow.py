"""What a shadow costs live traffic: times under an alias that is copied beside one that is not, in turns.

`python -m benchmarks.shadow [--turns 6] [--requests 150] [--json FILE]`

Starts a whole stack with simulated engines of a known step time: one model that answers under two aliases,
and another one that gets a copy of every request of one alias. The shadow is well, ten times slower (its
processes run a tenth of the time), hangs (they are stopped), or crashes (they are killed every second).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.stack import RunningStack, running_stack, write_result
from services.supervisor.config import BUNDLED_MODEL

CONCURRENCY = 8
# Of a copy: those of one turn have ended before the next.
LIMIT_S = 2.0
CONFIG = f"""
[models.live]
path = "{BUNDLED_MODEL}"
[models.shadow]
path = "{BUNDLED_MODEL}"
[routes]
plain = {{live = 1}}
copied = {{live = 1}}
[shadows.copied]
model = "shadow"
timeout_s = {LIMIT_S}
[engine.simulation]
step_ms = 5.0
"""
ALIASES = ("plain", "copied")


def _signal(stack: RunningStack, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, KeyError):
        os.killpg(stack.pids()["engine-1"], number)


async def _slow(stack: RunningStack) -> None:
    while True:
        _signal(stack, signal.SIGSTOP)
        await asyncio.sleep(0.09)
        _signal(stack, signal.SIGCONT)
        await asyncio.sleep(0.01)


async def _hang(stack: RunningStack) -> None:
    while True:
        # The supervisor starts another one after some seconds, which hangs as well.
        _signal(stack, signal.SIGSTOP)
        await asyncio.sleep(0.5)


async def _crash(stack: RunningStack) -> None:
    while True:
        _signal(stack, signal.SIGKILL)
        await asyncio.sleep(1.0)


async def _well(stack: RunningStack) -> None:
    await asyncio.Event().wait()


CASES: dict[str, Callable[[RunningStack], Any]] = {
    "well": _well,
    "ten times slower": _slow,
    "hangs": _hang,
    "crashes": _crash,
}


@asynccontextmanager
async def _treated(stack: RunningStack, treatment: Callable[[RunningStack], Any]) -> AsyncIterator[None]:
    task = asyncio.create_task(treatment(stack))
    try:
        yield
    finally:
        task.cancel()
        _signal(stack, signal.SIGCONT)


async def _one(client: httpx.AsyncClient, alias: str) -> tuple[float, float]:
    """Seconds to the first token and to the last."""
    body = {
        "model": alias,
        "messages": [{"role": "user", "content": "Go on."}],
        "max_tokens": 16,
        "stream": True,
        "ignore_eos": True,
    }
    began_s = time.perf_counter()
    first_s = 0.0
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and not first_s:
                first_s = time.perf_counter() - began_s
    return first_s, time.perf_counter() - began_s


async def _turn(client: httpx.AsyncClient, alias: str, num_requests: int) -> list[tuple[float, float]]:
    slots = asyncio.Semaphore(CONCURRENCY)

    async def one() -> tuple[float, float]:
        async with slots:
            return await _one(client, alias)

    return await asyncio.gather(*(one() for _ in range(num_requests)))


def _told(times: list[tuple[float, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, values in zip(("ttft", "whole"), zip(*times, strict=True), strict=True):
        cuts = statistics.quantiles(values, n=100)
        found |= {f"{name}_p50_ms": 1000 * cuts[49], f"{name}_p99_ms": 1000 * cuts[98]}
    return found


async def _case(stack: RunningStack, name: str, turns: int, requests: int) -> dict[str, Any]:
    times: dict[str, list[tuple[float, float]]] = {alias: [] for alias in ALIASES}
    headers = {"authorization": f"Bearer {stack.state.api_key}"}
    async with (
        httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=60, trust_env=False) as client,
        _treated(stack, CASES[name]),
    ):
        for turn in range(turns):
            for alias in ALIASES if turn % 2 else reversed(ALIASES):
                times[alias] += await _turn(client, alias, requests)
                if alias == "copied":
                    await asyncio.sleep(LIMIT_S)
    return {alias: _told(each) for alias, each in times.items()}


def main() -> None:
    """Prints a table of milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--requests", type=int, default=150, help="of a turn")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {}
    print(f"{'the shadow':18} {'alias':8} {'TTFT p50':>9} {'p99':>8} {'whole p50':>10} {'p99':>8}  ms")
    for name in CASES:
        # Each with a stack of its own: what one has left behind is no other's.
        with running_stack(CONFIG, "--simulated") as stack:
            asyncio.run(_case(stack, "well", 1, 50))
            result[name] = asyncio.run(_case(stack, name, options.turns, options.requests))
            result[name]["copies"] = stack.counter("gateway", "millrace_shadow_requests_total")
        for alias in ALIASES:
            first, slow, whole, last = result[name][alias].values()
            print(f"{name:18} {alias:8} {first:9.1f} {slow:8.1f} {whole:10.1f} {last:8.1f}")
    write_result(options.json, result)


if __name__ == "__main__":
    main()
