"""What the whole path costs when the engine answers instantly: Envoy, gateway, tokenizer, engine and back.

`python -m benchmarks.gateway_overhead [--quick] [--output FILE] [--other NAME=URL#KEY#MODEL ...]`

Authentication, limits, tracing and ledger are on. Four loads on `/v1/chat/completions`:

  alone      one request at a time, one token: added latency
  rate       32 at a time, one token: requests per second
  stream     64 streams of 128 tokens at full speed: tokens per second
  paced      256 streams at 20 ms a token: share of tokens that come within 50 ms of when they are due

A token is due one engine step after the token before it. Tokens are counted, not reads: TCP and proxies join
chunks. With `--other` the same loads run against other OpenAI-compatible gateways in the same run, which must
have a back end of the same speed behind them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import httptools
import msgspec
import psutil
import uvloop

from services.bench.report import machine
from services.supervisor.state import RunState, read_state

STEP_MS = 20.0
LATE_S = 0.050
START_LIMIT_S = 120.0


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
    # Share of gaps between tokens that are at most one step plus 50 ms.
    on_time: float
    num_failed: int
    # CPU milliseconds per request of each process, where it is ours.
    cpu_ms: dict[str, float] = {}


class _Stream(asyncio.Protocol):
    """One connection that sends a request again and again; counts events that carry a choice."""

    def __init__(self, request: bytes, shared: _Counts) -> None:
        self._request = request
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
        self._started_s = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        now_s = time.perf_counter()
        count = (self._tail + body).count(b'"finish_reason"') - self._tail.count(b'"finish_reason"')
        self._tail = body[-20:]
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
        self._last_s = now_s
        shared.num_tokens += count

    def on_message_complete(self) -> None:
        self._shared.latencies_s.append(time.perf_counter() - self._started_s)
        self._shared.num_failed += self._parser.get_status_code() != 200
        asyncio.get_running_loop().call_soon(self._next)

    def connection_lost(self, exc: Exception | None) -> None:
        self.done.set_result(None)


class _Counts:
    def __init__(self, load: Load) -> None:
        self.left = load.num_requests
        self.ttfts_s: list[float] = []
        self.latencies_s: list[float] = []
        self.num_tokens = self.num_gaps = self.num_late = self.num_failed = 0


async def measure(
    peer: Peer, load: Load, processes: Sequence[tuple[str, int]] = (), *, headers: str = ""
) -> Figures:
    """Runs one load. `headers` are more lines for every request, each with its end."""
    body = {
        "model": peer.model,
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": load.num_tokens,
        "stream": True,
        "temperature": 0,
        "ignore_eos": True,
    }
    content = json.dumps(body).encode()
    request = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {peer.host}\r\nauthorization: Bearer {peer.key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n{headers}\r\n"
    ).encode() + content
    counts = _Counts(load)
    loop = asyncio.get_running_loop()
    cpu_before = _cpu_s(processes)
    started_s = time.perf_counter()
    streams = []
    for _ in range(load.concurrency):
        _, stream = await loop.create_connection(lambda: _Stream(request, counts), peer.host, peer.port)
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


@contextmanager
def millrace(step_ms: float, *, simulated: bool = True) -> Iterator[RunState]:
    """The whole stack, stopped at the end: with a simulated engine, or with the bundled model."""
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        config = Path(folder) / "millrace.toml"
        config.write_text(
            f"[engine.simulation]\nstep_ms = {step_ms}\n[engine.scheduler]\nmax_num_seqs = 256\n"
        )
        engine = ["--simulated"] if simulated else []
        command = [sys.executable, "-m", "services.cli", "up", *engine, "--port", "0"]
        process = subprocess.Popen(
            [*command, "--config", str(config)],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "MILLRACE_STATE_DIR": folder},
        )
        try:
            limit_s = time.monotonic() + START_LIMIT_S
            while (state := read_state(Path(folder))) is None:
                if process.poll() is not None or time.monotonic() > limit_s:
                    raise SystemExit("the stack did not start; run `millrace up --simulated` to see why")
                time.sleep(0.1)
            yield state
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def own(state: RunState) -> tuple[Peer, list[tuple[str, int]]]:
    """Our stack as a peer, with its processes."""
    host, _, port = state.address.rpartition(":")
    peer = Peer("millrace", host, int(port), state.api_key, state.model)
    return peer, [(each.name, each.pid) for each in state.processes]


def other(text: str) -> Peer:
    """NAME=URL#KEY#MODEL."""
    name, _, rest = text.partition("=")
    url, key, model = rest.split("#")
    host, _, port = url.removeprefix("http://").rstrip("/").rpartition(":")
    return Peer(name, host, int(port), key, model)


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
    return (
        f"{figures.requests_per_s:8.0f} requests/s {figures.tokens_per_s:8.0f} tokens/s   "
        f"TTFT p50 {figures.ttft_p50_ms:7.2f} p99 {figures.ttft_p99_ms:7.2f} ms   "
        f"on time {figures.on_time:7.2%}   failed {figures.num_failed}   CPU ms a request: {cpu}"
    )


def main() -> None:
    """Prints the figures, and writes them with the machine when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    parser.add_argument("--other", type=other, action="append", default=[], help="NAME=URL#KEY#MODEL")
    arguments = parser.parse_args()
    scale = 10 if arguments.quick else 1
    instant = {
        "alone": Load(1, 1000 // scale, 1),
        "rate": Load(32, 10_000 // scale, 1),
        "stream": Load(64, 1280 // scale, 128),
    }
    paced = {"paced": Load(256, 512 if not arguments.quick else 256, 128 if not arguments.quick else 32)}
    results: dict[str, dict[str, Figures]] = {}
    for step_ms, loads in ((0.0, instant), (STEP_MS, paced)):
        with millrace(step_ms) as state:
            peer, processes = own(state)
            measured = uvloop.run(run_loads(peer, loads, processes))
        results.setdefault(peer.name, {}).update(measured)
    for peer in arguments.other:
        results[peer.name] = uvloop.run(run_loads(peer, {**instant, **paced}))
    if arguments.output is not None:
        report = {"machine": machine(), "results": results}
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


if __name__ == "__main__":
    main()
