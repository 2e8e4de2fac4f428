"""Does the memory of an engine's core grow with requests of all kinds?

`python -m benchmarks.core_memory [--requests 40000] [--json ...]`

A whole stack with the bundled model and a small cache. In turn: logprobs of the 20 likeliest tokens, a client
that leaves, a schema that nobody has sent before, and a plain question, 16 at a time. Printed is what of the
core's memory belongs to no file, after every eighth of the requests.
"""

from __future__ import annotations

import asyncio
import json
import random
from itertools import count, islice
from pathlib import Path
from typing import Any

import psutil

from benchmarks.engine.report import options
from benchmarks.neighbour.requests import Target, chat_body, json_fields, request_head
from benchmarks.stack import RunningStack, running_stack, write_result

NUM_CLIENTS = 16
CONFIG = """
[observability]
sample_ratio = 0.0
[engine.cache]
kv_cache_bytes = 67108864
[tenants.development]
tokens_per_minute = 1000000000
"""
_WORDS = ("river", "stone", "a", "of", "the", "in", "light", "and", "when", "under", "it", "fell", "far")


def _schema(number: int) -> dict[str, Any]:
    name = f"key_{number}"
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "fresh", "schema": schema}}}


async def _ask(target: Target, number: int, drawn: random.Random) -> None:
    leaves = number % 4 == 1
    fields: dict[str, Any] = {"max_tokens": 200 if leaves else 12, "stream": True}
    if number % 4 == 0:
        fields |= {"logprobs": True, "top_logprobs": 20}
    if number % 4 == 2:
        fields |= _schema(number)
    text = " ".join(drawn.choices(_WORDS, k=drawn.randrange(5, 60)))
    path, body = chat_body(
        target, json_fields(**fields), json.dumps([{"role": "user", "content": text}]).encode()
    )
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        writer.write(request_head(target, path, len(body)) + body)
        answer = await reader.readuntil(b"\r\n")
        if b" 200 " not in answer:
            raise SystemExit(f"request {number} was refused: {answer.decode()}")
        # A client that leaves has read no more than the beginning.
        while not leaves and (piece := await reader.read(65536)):
            if b"[DONE]" in piece or b"0\r\n\r\n" in piece[-8:]:
                break
    finally:
        writer.close()


def _core(stack: RunningStack) -> psutil.Process:
    front = psutil.Process(stack.pids()["engine-0"])
    return max(front.children(recursive=True), key=lambda each: each.memory_info().rss)


def _own_mib(process: psutil.Process) -> float:
    rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    return int(rollup.split("Anonymous:")[1].split()[0]) / 1024


async def _measure(stack: RunningStack, num_requests: int) -> list[float]:
    host, _, port = stack.state.address.rpartition(":")
    target = Target(host, int(port), stack.state.api_key, stack.state.model)
    core, drawn, numbers, found = _core(stack), random.Random(0), count(), []

    async def client(most: int) -> None:
        for number in islice(numbers, most):
            await _ask(target, number, drawn)

    for _ in range(8):
        await asyncio.gather(*(client(num_requests // 8 // NUM_CLIENTS) for _ in range(NUM_CLIENTS)))
        found.append(_own_mib(core))
        print(f"{len(found) * num_requests // 8:7,} requests  {found[-1]:8.2f} MiB", flush=True)
    return found


def main() -> None:
    """Prints the memory, and its growth from the first eighth, which fills caches, to the last."""
    parser = options(__doc__)
    parser.add_argument("--requests", type=int, default=40_000)
    arguments = parser.parse_args()
    with running_stack(CONFIG) as stack:
        found = asyncio.run(_measure(stack, arguments.requests))
    per_5000 = (found[-1] / found[0] - 1) / (arguments.requests * 7 / 8) * 5000
    print(f"growth per 5,000 requests: {per_5000:+.2%}")
    write_result(arguments.json, {"requests": arguments.requests, "mib": found, "growth_per_5000": per_5000})


if __name__ == "__main__":
    main()
