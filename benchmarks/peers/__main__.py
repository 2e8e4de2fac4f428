"""Millrace beside other servers: same machine, same checkpoint, same client, runs in turn (A B A B).

`python -m benchmarks.peers [--checkpoint qwen3-0.6b] [--peers vllm llama.cpp-q8_0 …] [--ours bf16 w8a8]
    [--loads 1 8 32 prefix] [--rounds 2] [--quick] [--environments DIR] [--output FILE]`

Peers are installed from PyPI, each into its own environment under DIR (several gigabytes; building llama.cpp
takes ten minutes on two cores). Ours is the whole stack behind Envoy, theirs the bare server. Prints a table
in Markdown: medians over the rounds, the best peer of each load, and the machine's roofline.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.peers import llama_cpp, openvino, vllm_cpu
from benchmarks.peers.checkpoints import SHAPES, make_checkpoint
from benchmarks.peers.loads import DEFAULT_LOADS, LOADS, Load
from benchmarks.peers.millrace import millrace
from benchmarks.peers.roofline import (
    Machine,
    Precision,
    bound_tokens_per_s,
    measure_machine,
    prefill_bound_tokens_per_s,
)
from benchmarks.peers.servers import Launch, Server, serve
from services.bench.client import Target
from services.bench.records import RequestRecord, Targets
from services.bench.report import machine, make_result
from services.bench.run import choose_model, run_workload

WARM_SEED = 1000
# Precision of ours: engine settings, and what the roofline must know of them.
OURS: dict[str, tuple[dict[str, object], Precision]] = {
    "bf16": ({"dtype": "bfloat16"}, Precision()),
    "int8": (
        {"dtype": "bfloat16", "quantize": "int8", "cache.kv_dtype": "int8"},
        Precision(weight_bytes=1.0, kv_bytes=1.0),
    ),
    "w8a8": (
        {"dtype": "bfloat16", "quantize": "w8a8", "cache.kv_dtype": "int8"},
        Precision(weight_bytes=1.0, kv_bytes=1.0, int8_rows=True),
    ),
    "int4": (
        {"dtype": "bfloat16", "quantize": "int4", "cache.kv_dtype": "int8"},
        Precision(weight_bytes=0.5, kv_bytes=1.0),
    ),
}
PEERS: dict[str, Callable[[Path, Path], Callable[[int], Launch]]] = {
    "vllm": vllm_cpu.prepare,
    "openvino": openvino.prepare,
    "llama.cpp-bf16": lambda folder, checkpoint: llama_cpp.prepare(folder, checkpoint, "bf16"),
    "llama.cpp-q8_0": lambda folder, checkpoint: llama_cpp.prepare(folder, checkpoint, "q8_0"),
}


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One load on one server. Times in milliseconds."""

    server: str
    load: str
    output_tokens_per_s: float
    ttft_mean_ms: float
    ttft_p99_ms: float
    tpot_mean_ms: float
    itl_p99_ms: float
    num_failed: int


@dataclass(kw_only=True)
class Measured:
    """Everything that a table needs."""

    runs: list[Run]
    start_s: dict[str, float]
    rss_bytes: dict[str, int]

    def of(self, server: str, load: str) -> list[Run]:
        """Runs of one load on one server."""
        return [run for run in self.runs if (run.server, run.load) == (server, load)]


async def run_load(server: Server, name: str, load: Load, seed: int) -> Run:
    """Sends one load and reads its figures. Raises SystemExit when every request failed."""
    target = Target.parse(server.url, server.api_key)
    model = await choose_model(target, server.model)
    # Other prompts than the load's, which would be found in the cache.
    warm = replace(load, num_requests=1, output_tokens=2, concurrency=1).workload(seed + WARM_SEED)
    await run_workload(target, warm, model, on_progress=_ignore)
    workload = load.workload(seed)
    records, duration_s = await run_workload(target, workload, model, on_progress=_ignore)
    result = make_result(
        label=server.name,
        url=server.url,
        model=model,
        workload=workload,
        targets=Targets(),
        records=records,
        duration_s=duration_s,
    )
    total = result.total
    if not (total.ttft_ms and total.tpot_ms and total.itl_ms):
        raise SystemExit(f"{server.name}, load {name}: {result.errors}")
    return Run(
        server=server.name,
        load=name,
        output_tokens_per_s=total.completion_tokens / duration_s,
        ttft_mean_ms=total.ttft_ms.mean,
        ttft_p99_ms=total.ttft_ms.p99,
        tpot_mean_ms=total.tpot_ms.mean,
        itl_p99_ms=total.itl_ms.p99,
        num_failed=total.num_failed,
    )


def _ignore(_record: RequestRecord) -> None:
    """No progress bar: it would draw from the measured machine."""


def measure_in_turn(
    servers: Sequence[AbstractContextManager[Server]],
    loads: Mapping[str, Load],
    rounds: int,
    measured: Measured,
) -> None:
    """Starts all `servers`, then runs each load on one after the other, `rounds` times."""
    with ExitStack() as stack:
        running = [stack.enter_context(server) for server in servers]
        for server in running:
            measured.start_s[server.name] = server.start_s
        for name, load in loads.items():
            for number in range(rounds):
                for server in running:
                    gc.collect()
                    run = asyncio.run(run_load(server, name, load, seed=number))
                    measured.runs.append(run)
                    print(
                        f"{server.name:18} {name:>6}  {run.output_tokens_per_s:8.1f} tokens/s   "
                        f"TTFT p99 {run.ttft_p99_ms:8.0f} ms   ITL p99 {run.itl_p99_ms:7.1f} ms   "
                        f"failed {run.num_failed}",
                        flush=True,
                    )
        for server in running:
            measured.rss_bytes[server.name] = server.rss_bytes()


def table(
    measured: Measured,
    loads: Mapping[str, Load],
    ours: list[str],
    peers: list[str],
    rates: Machine,
    checkpoint: str,
) -> list[str]:
    """Rows in Markdown."""
    lines = [
        "| load | server | output tokens/s | × best peer | of roofline | TTFT p99 ms | ITL p99 ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for load, sizes in loads.items():
        best = max((_median(measured.of(peer, load), "output_tokens_per_s") for peer in peers), default=0.0)
        for server in [*ours, *peers]:
            runs = measured.of(server, load)
            if not runs:
                continue
            rate = _median(runs, "output_tokens_per_s")
            roofline = ""
            if server in ours:
                precision = OURS[server.removeprefix("millrace-")][1]
                bound = bound_tokens_per_s(rates, checkpoint, sizes, precision)
                roofline = f"{rate / bound:.0%} of {bound:.0f}"
            ratio = f"{rate / best:.2f}" if best else ""
            lines.append(
                f"| {load} | {server} | {rate:.1f} | {ratio} | {roofline} | "
                f"{_median(runs, 'ttft_p99_ms'):.0f} | {_median(runs, 'itl_p99_ms'):.1f} |"
            )
    footers = [
        f"{server}: ready after {measured.start_s[server]:.1f} s, "
        f"{measured.rss_bytes[server] / 2**30:.2f} GiB resident after the runs"
        for server in [*ours, *peers]
    ]
    return [*lines, "", *prefill_lines(measured, [*ours, *peers], rates, checkpoint), *footers]


def prefill_lines(measured: Measured, servers: list[str], rates: Machine, checkpoint: str) -> list[str]:
    """Prompt tokens per second of each server on the load of long prompts, where that was run."""
    lines = []
    for server in servers:
        runs = measured.of(server, "prefill")
        if runs:
            rate = 1000 * LOADS["prefill"].input_tokens / _median(runs, "ttft_mean_ms")
            precision = OURS.get(server.removeprefix("millrace-"), ({}, Precision()))[1]
            bound = prefill_bound_tokens_per_s(rates, checkpoint, precision)
            lines.append(
                f"{server}: {rate:.0f} prompt tokens/s on prompts of {LOADS['prefill'].input_tokens}, "
                f"{rate / bound:.0%} of the machine's rate of multiplication in that precision"
            )
    return lines


def _median(runs: list[Run], field: str) -> float:
    return median([float(getattr(run, field)) for run in runs] or [0.0])


def main() -> None:
    """Runs every peer beside ours, prints the table, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--checkpoint", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--peers", nargs="*", choices=sorted(PEERS), default=["vllm", "llama.cpp-q8_0"])
    parser.add_argument("--ours", nargs="+", choices=sorted(OURS), default=["bf16", "w8a8"])
    parser.add_argument("--loads", nargs="+", choices=sorted(LOADS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one request for each place")
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    folder = arguments.environments.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    loads = {name: LOADS[name] for name in arguments.loads or DEFAULT_LOADS[arguments.checkpoint]}
    if arguments.quick:
        loads = {name: replace(load, num_requests=load.concurrency) for name, load in loads.items()}
    checkpoint = make_checkpoint(arguments.checkpoint, folder)
    rates = measure_machine()
    print(
        f"memory {rates.read_bytes_per_s / 1e9:.1f} GB/s, "
        f"bf16 GEMM {rates.bfloat16_flops_per_s / 1e12:.2f} TFLOP/s, "
        f"int8 GEMM {rates.int8_ops_per_s / 1e12:.2f} Top/s"
    )
    ours = [f"millrace-{precision}" for precision in arguments.ours]
    servers: list[AbstractContextManager[Server]] = [
        millrace(name, checkpoint, folder / f"{name}.log", OURS[precision][0])
        for name, precision in zip(ours, arguments.ours, strict=True)
    ]
    servers += [
        serve(peer, PEERS[peer](folder, checkpoint), folder / f"{peer}.log") for peer in arguments.peers
    ]
    measured = Measured(runs=[], start_s={}, rss_bytes={})
    measure_in_turn(servers, loads, arguments.rounds, measured)
    lines = table(measured, loads, ours, arguments.peers, rates, arguments.checkpoint)
    print("\n".join(lines))
    if arguments.output is not None:
        report = {
            "machine": machine() | asdict(rates),
            "checkpoint": arguments.checkpoint,
            **asdict(measured),
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


if __name__ == "__main__":
    main()
