"""What tracing costs: the same load with every request traced, and with none, by turns on one running stack.

`python -m benchmarks.tracing_overhead [--blocks N] [--load NAME ...] [--output FILE]`

Whether a request is traced is what its client's traceparent says, so both kinds run on the same processes,
block after block (A B B A), and whatever else the machine does falls on both. A loss is the mean over pairs
of neighbouring blocks, with its standard error: a loss below about two of these cannot be told from none.
Loads: `instant`, an engine that answers at once, where the processes in front of it are the bottleneck: the
worst case; `fast` and `paced`, steps of 1 and 20 ms; `model`, the bundled model. CPU time is summed over all
our processes, the span store included, until the last span of a block is written.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil
import uvloop

from benchmarks.gateways.load import Figures, Load, Peer, measure
from benchmarks.gateways.peers import own
from benchmarks.stack import running_stack
from observability.store import SpanReader
from services.bench.report import machine
from services.supervisor.state import RunState

# Time for the spans of a block to be exported and written.
_SETTLE_S = 2.0
_SPANS_A_REQUEST = 15


class Setting(msgspec.Struct, frozen=True):
    """A load and what it runs on; without `step_ms` the bundled model."""

    load: Load
    step_ms: float | None = None


LOADS: Mapping[str, Setting] = {
    "instant": Setting(Load(32, 320, 128), 0.0),
    "fast": Setting(Load(32, 320, 128), 1.0),
    "paced": Setting(Load(64, 128, 64), 20.0),
    "model": Setting(Load(16, 96, 64)),
}


class Block(msgspec.Struct, frozen=True):
    """One load, traced or not."""

    traced: bool
    tokens_per_s: float
    ttft_p50_ms: float
    cpu_ms: dict[str, float]
    num_failed: int

    @property
    def total_cpu_ms(self) -> float:
        """Of all processes, a request."""
        return sum(self.cpu_ms.values())


def _traceparent(*, traced: bool) -> str:
    # One trace for all requests of a block: what is measured does not depend on ids.
    return f"traceparent: 00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{'01' if traced else '00'}\r\n"


def _cpu_s(processes: Sequence[tuple[str, int]]) -> dict[str, float]:
    used = {}
    for name, pid in processes:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        used[name] = sum(sum(each.cpu_times()[:2]) for each in family)
    return used


async def _block(peer: Peer, load: Load, processes: Sequence[tuple[str, int]], *, traced: bool) -> Block:
    before = _cpu_s(processes)
    figures: Figures = await measure(peer, load, headers=_traceparent(traced=traced))
    await asyncio.sleep(_SETTLE_S)
    after = _cpu_s(processes)
    cpu_ms = {name: (after[name] - before[name]) / load.num_requests * 1000 for name in after}
    return Block(traced, figures.tokens_per_s, figures.ttft_p50_ms, cpu_ms, figures.num_failed)


async def _blocks(state: RunState, load: Load, num_blocks: int) -> list[Block]:
    peer, processes = own(state)
    for traced in (True, False):
        await measure(
            peer, Load(load.concurrency, load.concurrency * 2, 2), headers=_traceparent(traced=traced)
        )
    await asyncio.sleep(_SETTLE_S)
    order = [index % 4 in {0, 3} for index in range(num_blocks)]
    found = [await _block(peer, load, processes, traced=traced) for traced in order]
    reader = SpanReader(Path(state.trace_store))
    last = len(reader.trace(reader.last_trace()))
    reader.close()
    # The figures mean nothing unless what should be traced was, and only that.
    expected = _SPANS_A_REQUEST * load.num_requests
    if last < expected:
        raise SystemExit(f"a traced block left {last} spans; at least {expected} were expected")
    return found


def compare(name: str, setting: Setting, num_blocks: int) -> dict[str, float]:
    """Medians over the blocks, and what tracing takes away, in per cent with standard errors."""
    simulated = setting.step_ms is not None
    config = "[engine.scheduler]\nmax_num_seqs = 256\n"
    if simulated:
        config += f"[engine.simulation]\nstep_ms = {setting.step_ms}\n"
    with running_stack(config, *(("--simulated",) if simulated else ())) as stack:
        blocks = uvloop.run(_blocks(stack.state, setting.load, num_blocks))
    result: dict[str, float] = {}
    for traced, label in ((False, "off"), (True, "on")):
        mine = [block for block in blocks if block.traced is traced]
        result[f"tokens_per_s_{label}"] = statistics.median(block.tokens_per_s for block in mine)
        result[f"ttft_p50_ms_{label}"] = statistics.median(block.ttft_p50_ms for block in mine)
        result[f"cpu_ms_per_request_{label}"] = statistics.median(block.total_cpu_ms for block in mine)
        parts = {process: statistics.median(b.cpu_ms[process] for b in mine) for process in mine[0].cpu_ms}
        result |= {f"cpu_ms_{process}_{label}": value for process, value in parts.items()}
        shown = " ".join(f"{process} {milliseconds:.2f}" for process, milliseconds in parts.items())
        print(f"{name:8} {label:3} CPU ms a request: {shown}")
    for key, losses in _paired(blocks).items():
        result[key] = statistics.mean(losses)
        result[f"{key}_error"] = statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else 0.0
    result["num_failed"] = float(sum(block.num_failed for block in blocks))
    print(
        f"{name:8} tokens/s {result['tokens_per_s_off']:.0f} -> {result['tokens_per_s_on']:.0f}   "
        f"loss {result['throughput_loss_percent']:.1f} ± {result['throughput_loss_percent_error']:.1f} %   "
        f"CPU ms a request {result['cpu_ms_per_request_off']:.2f} -> {result['cpu_ms_per_request_on']:.2f} "
        f"({result['cpu_increase_percent']:+.1f} ± {result['cpu_increase_percent_error']:.1f} %)",
        flush=True,
    )
    return result


def _paired(blocks: Sequence[Block]) -> dict[str, list[float]]:
    """What tracing takes, in per cent, of every pair of neighbouring blocks."""
    found: dict[str, list[float]] = {"throughput_loss_percent": [], "cpu_increase_percent": []}
    for first, second in zip(blocks[::2], blocks[1::2], strict=True):
        on, off = (first, second) if first.traced else (second, first)
        found["throughput_loss_percent"].append(100 * (1 - on.tokens_per_s / off.tokens_per_s))
        found["cpu_increase_percent"].append(100 * (on.total_cpu_ms / off.total_cpu_ms - 1))
    return found


def main() -> None:
    """Prints the figures, and writes them with the machine when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8, help="blocks a load, even, half of them traced")
    parser.add_argument("--load", action="append", choices=tuple(LOADS), help="only these loads")
    parser.add_argument(
        "--output", type=Path, help="write the figures here as JSON, beside those of other loads"
    )
    arguments = parser.parse_args()
    results = {name: compare(name, LOADS[name], arguments.blocks) for name in arguments.load or LOADS}
    if arguments.output is not None:
        before = msgspec.json.decode(arguments.output.read_bytes()) if arguments.output.exists() else {}
        report = {
            "machine": machine(),
            "blocks": arguments.blocks,
            "results": {**before.get("results", {}), **results},
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


if __name__ == "__main__":
    main()
