"""What tracing costs: the same load with every request traced, and with none, by turns on one running stack.

`python -m benchmarks.tracing_overhead [--pairs N] [--load NAME ...] [--output FILE]`

Whether a request is traced is what its client's traceparent says, so both kinds run on the same processes.
"Off" therefore means not sampled: exporters and the span store run and have nothing to do, and requests carry
their trace's identity. What a stack without any exporter would save beyond that is not part of the figures.
The load never pauses; its kind changes (A BB AA BB … A), and each change is followed by a time that does not
count, until the spans of the other kind have been exported and written. So what is measured is the steady
state, exports and the span store included. Every pair of neighbouring windows gives two numbers: how much
throughput tracing takes, and how much CPU time a request it adds in all our processes. Reported are the
medians over the pairs with bootstrapped 95 % intervals. Pairs during which other programs took more than a
twentieth of the machine are left out, and counted. Pairs in `--output` from before are taken in.

Loads: `instant`, an engine that answers at once, where the processes in front of it are the bottleneck: the
worst case; `fast` and `paced`, steps of 1 and 20 ms; `model`, the bundled model.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.gateways.load import Load, Peer, cpu_s
from benchmarks.gateways.peers import own
from benchmarks.stack import running_stack
from observability.analysis.store import SpanReader
from observability.emit import names
from services.bench.client import BenchTarget, Client
from services.bench.records import RequestRecord
from services.bench.report import machine
from services.bench.workload import plan
from services.supervisor.state import RunState

# Longer than the longest request, the exporters' delay and the store's together.
_SETTLE_S = 2.2
_WINDOW_S = 2.5
_FOREIGN_SHARE = 0.05
# A traced request leaves one of each.
_SPANS = (names.GATEWAY_REQUEST, names.TOKENIZER_PREPARE, names.ENGINE_REQUEST)
_RESAMPLES = 4000


class Setting(msgspec.Struct, frozen=True):
    """A load and what it runs on; without `step_ms` the bundled model."""

    load: Load
    step_ms: float | None = None


# The number of requests does not count: time does.
LOADS: Mapping[str, Setting] = {
    "instant": Setting(Load(32, 1, 128), 0.0),
    "fast": Setting(Load(32, 1, 128), 1.0),
    "paced": Setting(Load(64, 1, 64), 20.0),
    "model": Setting(Load(16, 1, 64)),
}


class Window(msgspec.Struct, frozen=True):
    """Some seconds of one kind. CPU times are milliseconds a request, by process."""

    traced: bool
    tokens_per_s: float
    cpu_ms: dict[str, float]
    foreign_share: float

    @property
    def total_cpu_ms(self) -> float:
        """Of all our processes, a request."""
        return sum(self.cpu_ms.values())


class Pair(msgspec.Struct, frozen=True):
    """Two windows, one after the other."""

    on: Window
    off: Window

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs took part."""
        return max(self.on.foreign_share, self.off.foreign_share) > _FOREIGN_SHARE

    @property
    def throughput_loss_percent(self) -> float:
        """What tracing takes."""
        return 100 * (1 - self.on.tokens_per_s / self.off.tokens_per_s)

    @property
    def cpu_increase_percent(self) -> float:
        """What tracing adds."""
        return 100 * (self.on.total_cpu_ms / self.off.total_cpu_ms - 1)


class Clock:
    """CPU seconds of each of our processes and of everything else since the last look."""

    def __init__(self, processes: Sequence[tuple[str, int]]) -> None:
        self._processes = processes
        self._before, self._own_s = self._read(), time.process_time()

    def lap(self) -> tuple[dict[str, float], float]:
        """By process, and of other programs."""
        now = self._read()
        spent = {name: now[name] - self._before[name] for name in now}
        self._before = now
        everything = spent.pop("machine") - (time.process_time() - self._own_s)
        self._own_s = time.process_time()
        return spent, everything - sum(spent.values())

    def _read(self) -> dict[str, float]:
        machine_times = psutil.cpu_times()
        idle_s = machine_times.idle + getattr(machine_times, "iowait", 0.0)
        return {"machine": sum(machine_times[:8]) - idle_s, **cpu_s(self._processes)}


class _Traced(BenchTarget, frozen=True, kw_only=True):
    """A target whose requests belong to a trace, sampled or not."""

    trace_id: str
    sampled: bool

    def head(self, method: str, path: str, length: int) -> bytes:
        """With the trace's identity."""
        head = super().head(method, path, length).removesuffix(b"\r\n")
        flags = "01" if self.sampled else "00"
        return head + f"traceparent: 00-{self.trace_id}-{secrets.token_hex(8)}-{flags}\r\n\r\n".encode()


class _Steady:
    """The load without an end; from each change of its kind on, requests go by a client of their own."""

    def __init__(self, peer: Peer, load: Load) -> None:
        workload = load.workload(ignore_eos=True)
        (self._request,) = plan(msgspec.structs.replace(workload, num_requests=1), peer.model)
        self._target = BenchTarget.parse(peer.url, peer.key)
        self._ended = False
        # By trace, in the order of the changes.
        self.records: dict[str, list[RequestRecord]] = {}
        self._clients: dict[str, Client] = {}

    def change(self, *, traced: bool) -> None:
        """What begins from now on is traced, or is not."""
        trace_id = secrets.token_hex(16)
        target = _Traced(**msgspec.structs.asdict(self._target), trace_id=trace_id, sampled=traced)
        self.records[trace_id], self._clients[trace_id] = [], Client(target)

    async def ask(self) -> None:
        """One request after another until the end."""
        while not self._ended:
            trace_id, client = next(reversed(self._clients.items()))
            self.records[trace_id].append(await client.run(self._request))

    async def end(self, asking: asyncio.Future[Any]) -> None:
        """Lets what is under way end."""
        self._ended = True
        await asking
        for client in self._clients.values():
            await client.close()


def _window(
    begun: tuple[bool, float, float, dict[str, float], float], records: Sequence[RequestRecord], load: Load
) -> Window:
    """A window, once all requests of the run are known."""
    traced, start_s, end_s, spent_s, foreign_s = begun
    times = (at_s for record in records for at_s in record.chunk_times_s)
    num_tokens = sum(start_s <= at_s < end_s for at_s in times)
    # Requests by their tokens: few of the long ones begin and end within the window.
    num_requests = num_tokens / load.num_tokens
    return Window(
        traced=traced,
        tokens_per_s=num_tokens / (end_s - start_s),
        cpu_ms={name: seconds / num_requests * 1000 for name, seconds in spent_s.items()},
        foreign_share=foreign_s / (end_s - start_s) / (os.cpu_count() or 1),
    )


async def _pairs(state: RunState, load: Load, num_pairs: int) -> tuple[list[Pair], int]:
    peer, processes = own(state)
    clock, steady = Clock(processes), _Steady(peer, load)
    begun = []
    for phase in range(num_pairs + 1):
        traced = phase % 2 == 0
        steady.change(traced=traced)
        if not phase:
            asking = asyncio.gather(*(steady.ask() for _ in range(load.concurrency)))
        await asyncio.sleep(_SETTLE_S)
        for _ in range(1 if phase in {0, num_pairs} else 2):
            clock.lap()
            start_s = time.perf_counter()
            await asyncio.sleep(_WINDOW_S)
            spent_s, foreign_s = clock.lap()
            begun.append((traced, start_s, time.perf_counter(), spent_s, foreign_s))
    await steady.end(asking)
    await asyncio.sleep(_SETTLE_S)
    trace_id, of_it = list(steady.records.items())[num_pairs // 2 * 2]
    _check(Path(state.trace_store), trace_id, len(of_it))
    records = [record for of_phase in steady.records.values() for record in of_phase]
    windows = [_window(each, records, load) for each in begun]
    pairs = []
    for first, second in zip(windows[::2], windows[1::2], strict=True):
        pairs.append(Pair(first, second) if first.traced else Pair(second, first))
    return pairs, sum(not record.ok for record in records)


def _check(store: Path, trace_id: str, num_requests: int) -> None:
    """The figures mean nothing unless what should be traced was."""
    reader = SpanReader(store)
    found = Counter(span.name for span in reader.trace(trace_id))
    reader.close()
    if any(found[name] < num_requests for name in _SPANS):
        raise SystemExit(f"{num_requests} traced requests left these spans only: {dict(found)}")


def measure(setting: Setting, num_pairs: int) -> tuple[list[Pair], int]:
    """Pairs on a stack of their own, and the number of requests that failed."""
    config = "[engine.scheduler]\nmax_num_seqs = 256\n"
    if setting.step_ms is not None:
        config += f"[engine.simulation]\nstep_ms = {setting.step_ms}\n"
    with running_stack(config, *(() if setting.step_ms is None else ("--simulated",))) as stack:
        return asyncio.run(_pairs(stack.state, setting.load, num_pairs))


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median with its bootstrapped 95 % interval."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return statistics.median(values), medians[_RESAMPLES // 40], medians[-_RESAMPLES // 40]


class Result(msgspec.Struct):
    """Figures of one load."""

    pairs: list[Pair]
    num_failed: int = 0
    figures: dict[str, float] = {}

    def summarize(self, name: str) -> None:
        """Fills in the figures and prints them."""
        good = [pair for pair in self.pairs if not pair.is_disturbed]
        self.figures = {"num_pairs": len(good), "num_disturbed": len(self.pairs) - len(good)}
        if not good:
            print(f"{name:8} all {len(self.pairs)} pairs were disturbed by other programs")
            return
        self._summarize_kind(name, "off", [pair.off for pair in good])
        self._summarize_kind(name, "on", [pair.on for pair in good])
        loss = self._interval("throughput_loss_percent", [pair.throughput_loss_percent for pair in good])
        cpu = self._interval("cpu_increase_percent", [pair.cpu_increase_percent for pair in good])
        figures = self.figures
        print(
            f"{name:8} tokens/s {figures['tokens_per_s_off']:.0f} -> {figures['tokens_per_s_on']:.0f}, "
            f"loss {loss}   CPU s per 1,000 requests {figures['cpu_s_per_1000_requests_off']:.2f} -> "
            f"{figures['cpu_s_per_1000_requests_on']:.2f}, more by {cpu}   "
            f"({len(good)} pairs, {len(self.pairs) - len(good)} disturbed, {self.num_failed} failed)",
            flush=True,
        )

    def _summarize_kind(self, name: str, label: str, windows: Sequence[Window]) -> None:
        parts = {
            process: statistics.median(each.cpu_ms[process] for each in windows)
            for process in windows[0].cpu_ms
        }
        self.figures |= {f"cpu_ms_{process}_{label}": value for process, value in parts.items()}
        self.figures[f"tokens_per_s_{label}"] = statistics.median(each.tokens_per_s for each in windows)
        total = statistics.median(each.total_cpu_ms for each in windows)
        self.figures[f"cpu_s_per_1000_requests_{label}"] = total
        shown = " ".join(f"{process} {value:.3f}" for process, value in parts.items())
        print(f"{name:8} {label:3} CPU ms a request: {shown}")

    def _interval(self, key: str, values: Sequence[float]) -> str:
        middle, low, high = interval(values)
        self.figures |= {key: middle, f"{key}_low": low, f"{key}_high": high}
        return f"{middle:.1f} % [{low:.1f}, {high:.1f}]"


class Report(msgspec.Struct):
    """What is written."""

    machine: dict[str, str]
    results: dict[str, Result] = {}


def main() -> None:
    """Prints the figures, and writes them with the machine when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6, help="pairs of windows a load")
    parser.add_argument("--load", action="append", choices=tuple(LOADS), help="only these loads")
    parser.add_argument("--output", type=Path, help="add the pairs to this file (JSON)")
    arguments = parser.parse_args()
    report = Report(machine())
    if arguments.output is not None and arguments.output.exists():
        report = msgspec.json.decode(arguments.output.read_bytes(), type=Report)
    for name in arguments.load or LOADS:
        result = report.results.setdefault(name, Result([]))
        pairs, num_failed = measure(LOADS[name], arguments.pairs)
        result.pairs += pairs
        result.num_failed += num_failed
        result.summarize(name)
        if arguments.output is not None:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            content = msgspec.json.format(msgspec.json.encode(report), indent=2)
            arguments.output.write_bytes(content + b"\n")


if __name__ == "__main__":
    main()
