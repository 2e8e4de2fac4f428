"""Prompts and answers on different engines, beside two engines that do both: what is lost, and what is won.

`python -m benchmarks.hand_over [--model MODEL] [--tokens 2000 3600] [--requests 40] [--kills 2] [--json ...]`

Long prompts come one after another beside answers of others. Some clients leave at a moment of chance, and
the engine that computes prompts is killed or stopped so often, in the middle. Printed are answers that differ
from another answer to the same prompt, and blocks that are held when all has ended (both must be 0); the time
to the first token, the gaps of the other answers, and how long a pull takes, as a part of the first token's
time too (it comes behind it). A machine that does something else makes times worthless, not the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
from millrace.engine.v1 import engine_pb2, engine_pb2_grpc

from benchmarks.engine.report import Row, options, percentile, publish
from benchmarks.stack import RunningStack, running_stack
from observability.emit import hand_overs

_LIMIT_S = 120.0
# Different prompts of each length, answers' lengths, and the part of the clients that leave.
_NUM_PROMPTS, _ANSWER_TOKENS, _LEAVING = 4, 24, 0.15
_CONFIG = """
[observability]
sample_ratio = 0.0
[tenants.development]
tokens_per_minute = 1000000000
[gateway.routing]
split_tokens = 256
continuation_wait_s = 60.0
[supervisor]
engines = 2
"""
_WAYS = {"both, chunked": "", "split pair": "prefill_engines = 1\n"}


@dataclass
class Seen:
    """What one batch of requests has shown."""

    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    num_left: int = 0
    num_failed: int = 0


class Load:
    """Requests to one stack; `answers` are those of every prompt, from whatever engine."""

    def __init__(self, stack: RunningStack, answers: dict[int, set[str]], seed: int) -> None:
        self._stack = stack
        self._answers = answers
        self._drawn = random.Random(seed)
        headers = {"authorization": f"Bearer {stack.state.api_key}"}
        self.http = httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=_LIMIT_S, trust_env=False)

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        asked = {
            "model": self._stack.state.model,
            "stream": True,
            "temperature": 0.8,
            "ignore_eos": True,
            **body,
        }
        async with self.http.stream("POST", "/v1/completions", json=asked) as answer:
            if answer.is_client_error:
                raise SystemExit(f"refused: {(await answer.aread()).decode()}")
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise httpx.HTTPError(str(event["error"]))
                    yield event["choices"][0]["text"] if event["choices"] else ""

    async def others(self, seen: Seen) -> None:
        """One answer after another, whose gaps count."""
        while True:
            last_s = 0.0
            async for _ in self._stream({"prompt": [7] * 16, "max_tokens": 400, "seed": 3}):
                now = time.perf_counter()
                if last_s:
                    seen.gaps_s.append(now - last_s)
                last_s = now

    async def ask(self, number: int, num_tokens: int, seen: Seen) -> None:
        """A long prompt that nobody has cached, whose client may leave."""
        prompt = random.Random(number)
        body = {
            "prompt": [prompt.randrange(100, 500) for _ in range(num_tokens)],
            "max_tokens": _ANSWER_TOKENS,
            "seed": number,
            "cache_salt": f"{self._drawn.random()}",
        }
        leaves_s = self._drawn.random() if self._drawn.random() < _LEAVING else _LIMIT_S
        began_s, text, first_s = time.perf_counter(), "", 0.0
        try:
            async with asyncio.timeout(leaves_s):
                async for piece in self._stream(body):
                    first_s = first_s or time.perf_counter() - began_s
                    text += piece
        except TimeoutError:
            seen.num_left += 1
        except httpx.HTTPError:
            seen.num_failed += 1
        else:
            seen.ttft_s.append(first_s)
            self._answers.setdefault(number * 100_000 + num_tokens, set()).add(text)


async def _batch(load: Load, stack: RunningStack, num_tokens: int, num_requests: int, kills: int) -> Seen:
    seen, drawn = Seen(), random.Random(num_tokens)
    readers = [asyncio.create_task(load.others(seen)) for _ in range(3)]
    killed_at = set(drawn.sample(range(num_requests), kills))
    for number in range(num_requests):
        asking = asyncio.create_task(load.ask(number % _NUM_PROMPTS, num_tokens, seen))
        if number in killed_at:
            await asyncio.sleep(drawn.random() / 2)
            with contextlib.suppress(ProcessLookupError):
                os.kill(stack.pids()["engine-0"], drawn.choice((signal.SIGKILL, signal.SIGSTOP)))
        await asking
    for reader in readers:
        reader.cancel()
    for ended in await asyncio.gather(*readers, return_exceptions=True):
        seen.num_failed += isinstance(ended, Exception)
    return seen


def _held(stack: RunningStack) -> int:
    """Blocks that engines hold when all requests have ended, and those that the books do not account for."""
    ends_s, held = time.monotonic() + _LIMIT_S, -1
    while held and time.monotonic() < ends_s:
        held = 0
        for address in stack.addresses("engine", "grpc"):
            with grpc.insecure_channel(address) as channel:
                stub = engine_pb2_grpc.EngineServiceStub(channel)
                try:
                    books = stub.CheckInvariants(engine_pb2.CheckInvariantsRequest(), timeout=_LIMIT_S)
                except grpc.RpcError:
                    # It is being started again.
                    held += 1
                    continue
            held += books.num_total_blocks - books.num_unreferenced_blocks + (not books.ok)
        time.sleep(0.2)
    return held


def _counted(stack: RunningStack) -> tuple[float, float, float]:
    """Pulls, their seconds and megabytes, at the engine that answers; it is never killed."""
    in_mb = stack.counter("engine", hand_overs.BYTES.name, 'direction="in"') / 1e6
    return (
        *(stack.counter("engine", metric.name) for metric in (hand_overs.PULLS, hand_overs.SECONDS)),
        in_mb,
    )


async def _row(way: str, stack: RunningStack, num_tokens: int, arguments: Any, answers: Any) -> Row:
    load = Load(stack, answers, num_tokens)
    before = _counted(stack)
    kills = arguments.kills if way == "split pair" else 0
    seen = await _batch(load, stack, num_tokens, arguments.requests, kills)
    await load.http.aclose()
    held = _held(stack)
    pulls, seconds, in_mb = (now - then for now, then in zip(_counted(stack), before, strict=True))
    ttft_s = statistics.median(seen.ttft_s) if seen.ttft_s else float("nan")
    return {
        "engines": way,
        "prompt tokens": num_tokens,
        "requests": arguments.requests,
        "left": seen.num_left,
        "failed": seen.num_failed,
        "held at the end": held,
        "ttft p50 ms": 1000 * ttft_s,
        "gap p99 ms": 1000 * percentile(seen.gaps_s, 0.99),
        "pulls": int(pulls),
        "MB a pull": in_mb / max(1, pulls),
        "pull ms": 1000 * seconds / max(1, pulls),
        "of ttft": seconds / max(1, pulls) / ttft_s,
    }


def main() -> None:
    """Prints the table."""
    parser = options(__doc__)
    parser.add_argument("--model", default="models/millrace-nano")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000, 3600])
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--kills", type=int, default=2)
    arguments = parser.parse_args()
    rows, answers = [], dict[int, set[str]]()
    for way, more in _WAYS.items():
        with running_stack(_CONFIG + more, "--model", arguments.model) as stack:
            rows += [asyncio.run(_row(way, stack, each, arguments, answers)) for each in arguments.tokens]
    differing = sum(len(texts) - 1 for texts in answers.values())
    notes = f"Differing answers to {len(answers)} prompts: {differing}."
    publish("Prompts and answers on different engines", rows, arguments.json, notes)


if __name__ == "__main__":
    main()
