"""Batches beside others, and batches of a million lines.

`python -m benchmarks.batches beside [--lines 10000] [--rate 4] [--seconds 60] [--json ...]`: interactive
chats at a rate, alone and beside a batch, on one stack: the 50th and 99th percentile of their time to the
first token, and lines a second.

`python -m benchmarks.batches million [--lines 1000000] [--json ...]`: the input of such a batch is
indexed, its results are written and read again as a gateway does that takes it over; resident memory after
each, beside that of a tenth of the lines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.engine.report import options
from benchmarks.stack import RunningStack, running_stack, write_result
from gateway.batches.lines import LineIndex, index_lines
from gateway.batches.spool import Spool, Written
from gateway.batches.types import LineOutcome

CONFIG = """
[tiers.interactive]
priority = 20
ttft_target_ms = 500
[tiers.batch]
priority = 0
[gateway]
default_tier = "interactive"
"""
URL = "/v1/chat/completions"
_TOGETHER = 256


def line(number: int, model: str, num_tokens: int) -> bytes:
    """One line of a batch."""
    body = {
        "model": model,
        "max_tokens": num_tokens,
        "messages": [{"role": "user", "content": f"Tell of number {number}."}],
    }
    return json.dumps({"custom_id": str(number), "method": "POST", "url": URL, "body": body}).encode() + b"\n"


# --- beside others ----------------------------------------------------------------------------------------


async def chats(client: httpx.AsyncClient, model: str, rate: float, seconds: float) -> list[float]:
    """Seconds to the first token of each chat that was sent meanwhile, in a Poisson process."""
    found: list[float] = []

    async def one(number: int) -> None:
        body = {
            "model": model,
            "stream": True,
            "max_tokens": 32,
            "messages": [{"role": "user", "content": f"Hello, {number}!"}],
        }
        sent_s = time.monotonic()
        async with client.stream("POST", URL, json=body) as answer:
            answer.raise_for_status()
            async for text in answer.aiter_lines():
                if text.startswith("data: {"):
                    found.append(time.monotonic() - sent_s)
                    break
            async for _ in answer.aiter_lines():
                pass

    draw, running, ends_s = random.Random(0), [], time.monotonic() + seconds
    while time.monotonic() < ends_s:
        running.append(asyncio.create_task(one(len(running))))
        await asyncio.sleep(draw.expovariate(rate))
    await asyncio.gather(*running)
    return found


async def beside(stack: RunningStack, num_lines: int, rate: float, seconds: float) -> dict[str, object]:
    """The figures."""
    model, key = stack.state.model, stack.state.api_key
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=600, trust_env=False) as client:
        await chats(client, model, rate, seconds / 4)
        alone = await chats(client, model, rate, seconds)
        lines = b"".join(line(each, model, 32) for each in range(num_lines))
        sent = {"file": ("lines.jsonl", lines)}
        file = (await client.post("/v1/files", files=sent, data={"purpose": "batch"})).json()
        asked = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
        batch = (await client.post("/v1/batches", json=asked)).json()
        path = f"/v1/batches/{batch['id']}"
        while (await client.get(path)).json()["status"] == "validating":
            await asyncio.sleep(0.1)
        before, began_s = (await client.get(path)).json(), time.monotonic()
        together = await chats(client, model, rate, seconds)
        after, took_s = (await client.get(path)).json(), time.monotonic() - began_s
        await client.post(f"{path}/cancel")
    done = after["request_counts"]["completed"] - before["request_counts"]["completed"]
    figures = {f"{name}_{part}": value for name, part, value in _percentiles(alone=alone, beside=together)}
    return {**figures, "chats": len(together), "lines_per_s": round(done / took_s, 2), "lines_done": done}


def _percentiles(**measured: list[float]) -> Iterator[tuple[str, str, float]]:
    for name, seconds in measured.items():
        cuts = statistics.quantiles(seconds, n=100, method="inclusive")
        yield name, "ttft_p50_ms", round(cuts[49] * 1000, 1)
        yield name, "ttft_p99_ms", round(cuts[98] * 1000, 1)


# --- a million lines --------------------------------------------------------------------------------------


def memory_of(num_lines: int) -> dict[str, float]:
    """MiB of a process of its own after each step, and the seconds of all."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return dict(pool.apply(_steps, (num_lines,)))


def _steps(num_lines: int) -> dict[str, float]:
    process = psutil.Process()

    def mebibytes() -> float:
        return round(process.memory_info().rss / 2**20, 1)

    with tempfile.TemporaryDirectory() as name:
        folder, began_s = Path(name), time.monotonic()
        with (folder / "input").open("wb") as file:
            for each in range(num_lines):
                file.write(line(each, "tiny", 16))
        found = {"before_mib": mebibytes()}
        index_lines(folder / "input", folder, URL, max_lines=num_lines, max_line_bytes=1 << 20)
        found["indexed_mib"] = mebibytes()
        with Spool(folder, num_lines) as spool:
            _answer_all(folder, spool)
            found["answered_mib"] = mebibytes()
        with Spool(folder, num_lines) as spool:
            assert sum(spool.counts) == num_lines, spool.counts
            found["taken_over_mib"] = mebibytes()
        found["seconds"] = round(time.monotonic() - began_s, 1)
    return found


def _answer_all(folder: Path, spool: Spool) -> None:
    index, results = LineIndex(folder / "index", spool.is_done), list[Written]()
    while (entry := index.next()) is not None:
        results.append(Written(entry.position, LineOutcome.SUCCEEDED, 0, b"x" * 400 + b"\n"))
        if len(results) == _TOGETHER:
            spool.commit(results)
            results.clear()
    spool.commit(results)
    index.close()


def main() -> None:
    """Prints the figures, and writes them as JSON with --json."""
    parser = options(__doc__)
    parser.add_argument("what", choices=("beside", "million"))
    parser.add_argument("--lines", type=int, help="of the batch")
    parser.add_argument("--rate", type=float, default=4.0, help="chats a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of both measurements")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    chosen = parser.parse_args()
    figures: dict[str, Any]
    if chosen.what == "million":
        num = chosen.lines or 1_000_000
        figures = {str(each): memory_of(each) for each in (num // 10, num)}
    else:
        with running_stack(CONFIG) as stack:
            figures = asyncio.run(beside(stack, chosen.lines or 10_000, chosen.rate, chosen.seconds))
    for name, value in figures.items():
        print(f"{name:24} {value}")
    write_result(chosen.json, figures)


if __name__ == "__main__":
    main()
