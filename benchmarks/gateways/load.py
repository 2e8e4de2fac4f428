"""Loads on `/v1/chat/completions` of any gateway, and what they give."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

import httptools
import msgspec
import psutil

STEP_MS = 20.0
LATE_S = 0.050
# Every event with a token has it, whatever else a gateway leaves out of its events.
_TOKEN_MARK = b'"delta"'


class Peer(msgspec.Struct, frozen=True):
    """A server under load."""

    name: str
    host: str
    port: int
    key: str
    model: str


class Load(msgspec.Struct, frozen=True):
    """`num_requests` in all, `concurrency` at a time, `num_tokens` each."""

    concurrency: int
    num_requests: int
    num_tokens: int


class Figures(msgspec.Struct, frozen=True):
    """What one load gave. Times are milliseconds."""

    requests_per_s: float
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    latency_p50_ms: float
    latency_p99_ms: float
    # Share of tokens that come at most one step plus 50 ms after the one before; what comes together with one
    # that is late is late.
    on_time: float
    # Share of tokens that come at most 50 ms after they are due by the schedule that the stream's first token
    # begins, one a step. A loss of time anywhere counts for every token that follows in the stream.
    on_schedule: float
    num_failed: int
    # CPU milliseconds per request of each process, where it is ours.
    cpu_ms: dict[str, float] = {}


class _Stream(asyncio.Protocol):
    """One connection that sends a request again and again; counts events that carry a choice."""

    def __init__(self, shared: Counts) -> None:
        self._shared = shared
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._next()

    def _next(self) -> None:
        if self._shared.left <= 0:
            self._transport.close()
            return
        self._shared.left -= 1
        self._parser = httptools.HttpResponseParser(self)
        self._tail = b""
        self._first_s = self._last_s = 0.0
        self._num_tokens = 0
        self._started_s = time.perf_counter()
        self._transport.write(self._shared.request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        now_s = time.perf_counter()
        count = (self._tail + body).count(_TOKEN_MARK) - self._tail.count(_TOKEN_MARK)
        self._tail = body[1 - len(_TOKEN_MARK) :]
        if not count:
            return
        shared = self._shared
        if not self._first_s:
            self._first_s = now_s
            shared.ttfts_s.append(now_s - self._started_s)
        else:
            gap_s = now_s - self._last_s
            # Tokens that come together with one that is late are late as well.
            shared.num_late += count if gap_s > STEP_MS / 1000 + LATE_S else 0
            shared.num_gaps += count
            # Of the tokens that come now, number 0 being the stream's first, those below this one are late.
            on_time_from = math.ceil((now_s - self._first_s - LATE_S) * 1000 / STEP_MS)
            shared.num_behind += min(count, max(0, on_time_from - self._num_tokens))
        self._last_s = now_s
        self._num_tokens += count
        shared.num_tokens += count

    def on_message_complete(self) -> None:
        self._shared.latencies_s.append(time.perf_counter() - self._started_s)
        self._shared.num_failed += self._parser.get_status_code() != 200
        asyncio.get_running_loop().call_soon(self._next)

    def connection_lost(self, exc: Exception | None) -> None:
        self.done.set_result(None)


class Counts:
    """What all connections of a load share: the next request, and what has come."""

    def __init__(self, request: bytes, num_requests: int) -> None:
        self.request = request
        self.left = num_requests
        self.ttfts_s: list[float] = []
        self.latencies_s: list[float] = []
        self.num_tokens = self.num_gaps = self.num_late = self.num_behind = 0
        self.num_failed = 0


def request_of(peer: Peer, load: Load, headers: str = "") -> bytes:
    """A request of this load. `headers` are more lines, each with its end."""
    body = {
        "model": peer.model,
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": load.num_tokens,
        "stream": True,
        "temperature": 0,
        **({"ignore_eos": True} if peer.name == "millrace" else {}),
    }
    content = json.dumps(body).encode()
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {peer.host}\r\nauthorization: Bearer {peer.key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n{headers}\r\n"
    ).encode() + content


@asynccontextmanager
async def steady(peer: Peer, load: Load, headers: str = "") -> AsyncIterator[Counts]:
    """The load without an end, until the block is left; `request` of what is given may be replaced."""
    counts = Counts(request_of(peer, load, headers), sys.maxsize)
    loop = asyncio.get_running_loop()
    streams = []
    for _ in range(load.concurrency):
        _, stream = await loop.create_connection(lambda: _Stream(counts), peer.host, peer.port)
        streams.append(stream.done)
    try:
        yield counts
    finally:
        counts.left = 0
        await asyncio.gather(*streams)


async def measure(
    peer: Peer, load: Load, processes: Sequence[tuple[str, int]] = (), *, headers: str = ""
) -> Figures:
    """Runs one load. `headers` are more lines for every request, each with its end."""
    counts = Counts(request_of(peer, load, headers), load.num_requests)
    loop = asyncio.get_running_loop()
    cpu_before = _cpu_s(processes)
    started_s = time.perf_counter()
    streams = []
    for _ in range(load.concurrency):
        _, stream = await loop.create_connection(lambda: _Stream(counts), peer.host, peer.port)
        streams.append(stream.done)
    await asyncio.gather(*streams)
    elapsed_s = time.perf_counter() - started_s
    return Figures(
        requests_per_s=load.num_requests / elapsed_s,
        tokens_per_s=counts.num_tokens / elapsed_s,
        ttft_p50_ms=_percentile(counts.ttfts_s, 0.5),
        ttft_p99_ms=_percentile(counts.ttfts_s, 0.99),
        latency_p50_ms=_percentile(counts.latencies_s, 0.5),
        latency_p99_ms=_percentile(counts.latencies_s, 0.99),
        on_time=1.0 - counts.num_late / max(counts.num_gaps, 1),
        on_schedule=1.0 - counts.num_behind / max(counts.num_gaps, 1),
        num_failed=counts.num_failed,
        cpu_ms={
            name: (used_s - cpu_before[name]) / load.num_requests * 1000
            for name, used_s in _cpu_s(processes).items()
        },
    )


def _percentile(seconds: list[float], share: float) -> float:
    ordered = sorted(seconds) or [0.0]
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000


def _cpu_s(processes: Sequence[tuple[str, int]]) -> dict[str, float]:
    used = {}
    for name, pid in processes:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        used[name] = sum(sum(each.cpu_times()[:2]) for each in family)
    return used


async def run_loads(
    peer: Peer, loads: dict[str, Load], processes: Sequence[tuple[str, int]] = ()
) -> dict[str, Figures]:
    """Every load, each after a short one that warms connections and caches."""
    results = {}
    for name, load in loads.items():
        await measure(peer, Load(load.concurrency, load.concurrency * 2, 2))
        results[name] = await measure(peer, load, processes)
        print(f"{peer.name:12} {name:8} {_line(results[name])}", flush=True)
    return results


def _line(figures: Figures) -> str:
    cpu = " ".join(f"{name} {value:.2f}" for name, value in figures.cpu_ms.items())
    total = sum(figures.cpu_ms.values())
    return (
        f"{figures.requests_per_s:8.0f} requests/s {figures.tokens_per_s:8.0f} tokens/s   "
        f"p50 {figures.latency_p50_ms:7.2f} p99 {figures.latency_p99_ms:7.2f} ms   "
        f"on time {figures.on_time:7.2%} (by schedule {figures.on_schedule:7.2%})   "
        f"failed {figures.num_failed}" + (f"   CPU ms a request: {cpu} = {total:.2f}" if cpu else "")
    )
