"""Loads on `/v1/chat/completions` of any gateway, and what they give; `services.bench` is the client."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import psutil

from benchmarks.engine.report import percentile
from services.bench.client import BenchTarget
from services.bench.records import RequestRecord
from services.bench.run import run_workload
from services.bench.workload import Arrivals, Lengths, Workload

STEP_MS = 20.0
LATE_S = 0.050
_PROMPT_WORDS = Lengths.parse("4")


class Peer(msgspec.Struct, frozen=True):
    """A server under load."""

    name: str
    url: str
    key: str
    model: str


class Load(msgspec.Struct, frozen=True):
    """`num_requests` in all, `concurrency` at a time, `num_tokens` each."""

    concurrency: int
    num_requests: int
    num_tokens: int

    def workload(self, *, ignore_eos: bool) -> Workload:
        """Greedy chats of a few words."""
        return Workload(
            num_requests=self.num_requests,
            arrivals=Arrivals(concurrency=self.concurrency),
            input_tokens=_PROMPT_WORDS,
            output_tokens=Lengths.parse(str(self.num_tokens)),
            prompt_kind="chat",
            ignore_eos=ignore_eos,
        )


class Figures(msgspec.Struct, frozen=True):
    """What one load gave. Times are milliseconds."""

    requests_per_s: float
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    latency_p50_ms: float
    latency_p99_ms: float
    # Share of chunks that come at most one step plus 50 ms after the one before; what comes together with one
    # that is late is late.
    on_time: float
    # Share of chunks that come at most 50 ms after they are due by the schedule that the stream's first chunk
    # begins, one a step. A loss of time anywhere counts for every chunk that follows in the stream.
    on_schedule: float
    num_failed: int
    # CPU milliseconds per request of each process, where it is ours.
    cpu_ms: dict[str, float] = {}


async def measure(peer: Peer, load: Load, processes: Sequence[tuple[str, int]] = ()) -> Figures:
    """Runs one load."""
    cpu_before = cpu_s(processes)
    workload = load.workload(ignore_eos=peer.name == "millrace")
    target = BenchTarget.parse(peer.url, peer.key)
    records, elapsed_s = await run_workload(target, workload, peer.model, on_progress=lambda _record: None)
    answered = [record for record in records if record.ok]
    ttfts_s = [record.ttft_s for record in answered]
    latencies_s = [record.end_s - record.start_s for record in answered]
    num_gaps = sum(len(record.chunk_times_s) - 1 for record in answered)
    return Figures(
        requests_per_s=len(answered) / elapsed_s,
        tokens_per_s=sum(record.completion_tokens for record in answered) / elapsed_s,
        ttft_p50_ms=1000 * percentile(ttfts_s, 0.5),
        ttft_p99_ms=1000 * percentile(ttfts_s, 0.99),
        latency_p50_ms=1000 * percentile(latencies_s, 0.5),
        latency_p99_ms=1000 * percentile(latencies_s, 0.99),
        on_time=1.0 - _num_late(answered) / max(num_gaps, 1),
        on_schedule=1.0 - _num_behind(answered) / max(num_gaps, 1),
        num_failed=len(records) - len(answered),
        cpu_ms={
            name: (used_s - cpu_before[name]) / load.num_requests * 1000
            for name, used_s in cpu_s(processes).items()
        },
    )


def _num_late(records: Iterable[RequestRecord]) -> int:
    late = 0
    for record in records:
        was_late = False
        for gap_s in record.itls_s:
            # What comes together has no time between.
            was_late = gap_s > STEP_MS / 1000 + LATE_S or (was_late and gap_s == 0)
            late += was_late
    return late


def _num_behind(records: Iterable[RequestRecord]) -> int:
    return sum(
        number < math.ceil((time_s - record.chunk_times_s[0] - LATE_S) * 1000 / STEP_MS)
        for record in records
        for number, time_s in enumerate(record.chunk_times_s)
    )


def cpu_s(processes: Sequence[tuple[str, int]]) -> dict[str, float]:
    """CPU seconds so far of processes with their children, by name."""
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
