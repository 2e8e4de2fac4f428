"""What tracing costs: the same loads with every request traced, and with none.

`python -m benchmarks.tracing_overhead [--quick] [--rounds N] [--output FILE]`

Rounds with and without alternate, so that what else the machine does falls on both. Two loads: `stream` with
an engine that answers instantly, where the processes in front of it are the bottleneck: the worst case;
and `model`, where a step takes 20 ms, as with a real one. CPU time is summed over all our processes, the span
store included, and told apart by process.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvloop

from benchmarks.gateway_overhead import Figures, Load, measure, millrace, own
from services.bench.report import machine

_STEP_MS = 20.0
# Envoy decides for the whole trace; the services follow it.
_SAMPLING = "MILLRACE_ENVOY__TRACE_SAMPLING_PERCENT"


@contextmanager
def sampling(percent: int) -> Iterator[None]:
    """The share of requests that a stack started inside traces."""
    before = os.environ.get(_SAMPLING)
    os.environ[_SAMPLING] = str(percent)
    try:
        yield
    finally:
        os.environ.pop(_SAMPLING)
        if before is not None:
            os.environ[_SAMPLING] = before


def measure_once(percent: int, load: Load, step_ms: float) -> Figures:
    """One stack, warmed up, under one load."""
    with sampling(percent), millrace(step_ms) as state:
        peer, processes = own(state)

        async def run() -> Figures:
            await measure(peer, Load(load.concurrency, load.concurrency * 2, 2))
            return await measure(peer, load, processes)

        return uvloop.run(run())


def compare(name: str, load: Load, step_ms: float, rounds: int) -> dict[str, float]:
    """Medians over the rounds, and what tracing takes away, in per cent."""
    measured: dict[int, list[Figures]] = {0: [], 100: []}
    for _ in range(rounds):
        for percent, figures in measured.items():
            figures.append(measure_once(percent, load, step_ms))
    tokens = {percent: statistics.median(f.tokens_per_s for f in each) for percent, each in measured.items()}
    cpu = {
        percent: statistics.median(sum(f.cpu_ms.values()) for f in each) for percent, each in measured.items()
    }
    for percent, each in measured.items():
        mean = {key: statistics.fmean(f.cpu_ms[key] for f in each) for key in each[0].cpu_ms}
        parts = " ".join(f"{process} {milliseconds:.2f}" for process, milliseconds in mean.items())
        print(f"{name:8} {percent:3} % traced, CPU ms a request: {parts}")
    result = {
        "tokens_per_s_off": tokens[0],
        "tokens_per_s_on": tokens[100],
        "throughput_loss_percent": 100 * (1 - tokens[100] / tokens[0]),
        "cpu_ms_per_request_off": cpu[0],
        "cpu_ms_per_request_on": cpu[100],
        "num_failed": float(sum(f.num_failed for each in measured.values() for f in each)),
    }
    print(
        f"{name:8} off {tokens[0]:8.0f} tokens/s   on {tokens[100]:8.0f}   loss "
        f"{result['throughput_loss_percent']:5.1f} %   CPU ms a request {cpu[0]:.2f} -> {cpu[100]:.2f}",
        flush=True,
    )
    return result


def main() -> None:
    """Prints the figures, and writes them with the machine when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    arguments = parser.parse_args()
    scale = 4 if arguments.quick else 1
    results = {
        "stream": compare("stream", Load(32, 1280 // scale, 128), 0.0, arguments.rounds),
        "model": compare("model", Load(32, 256 // scale, 64), _STEP_MS, arguments.rounds),
    }
    if arguments.output is not None:
        report = {"machine": machine(), "rounds": arguments.rounds, "results": results}
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


if __name__ == "__main__":
    main()
