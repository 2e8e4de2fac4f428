"""Which process of our stack takes how much of the machine and of memory, and what a run's time is made of.

`python -m benchmarks.peers.processes [--checkpoint llama-40m] [--ours bf16] [--loads 1 32] [--quick]
    [--environments DIR]`

Everything beside the core takes cycles from the threads that compute: these rows say how many. The second
table has the steps by kind as the engine counts them; what they leave of the run is planning, publishing, and
waiting for requests.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import time
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from benchmarks.peers.__main__ import run_load
from benchmarks.peers.checkpoints import SHAPES, make_checkpoint
from benchmarks.peers.loads import LOADS, Load
from benchmarks.peers.millrace import millrace
from benchmarks.peers.servers import Server
from benchmarks.peers.tables import OURS


@dataclass(frozen=True)
class Use:
    """What a process has taken since its start."""

    cpu_s: float
    num_switches: int


def uses(server: Server) -> dict[str, Use]:
    """Use of every process of the stack, and of this client, by name."""
    own = psutil.Process(os.getpid())
    family = [*psutil.Process(server.pid).children(recursive=True), psutil.Process(server.pid)]
    return {"client": _use(own), **{_name(process): _use(process) for process in family}}


def _name(process: psutil.Process) -> str:
    words = process.cmdline()
    if "-m" in words:
        return words[words.index("-m") + 1]
    return Path(words[0]).name if words else str(process.pid)


def _use(process: psutil.Process) -> Use:
    times, switches = process.cpu_times(), process.num_ctx_switches()
    # Switches are those of the main thread; what matters here is how often it was woken.
    return Use(times.user + times.system, switches.voluntary)


def resident_bytes(server: Server) -> dict[str, int]:
    """Memory of every process of the stack, shared pages counted by share; equal names are added up."""
    total: dict[str, int] = {}
    for process in [*psutil.Process(server.pid).children(recursive=True), psutil.Process(server.pid)]:
        total[_name(process)] = total.get(_name(process), 0) + process.memory_full_info().pss
    return total


def steps(server: Server) -> dict[str, tuple[int, float]]:
    """Number of the engine's steps so far and their seconds, by kind."""
    with urllib.request.urlopen(server.metrics_url, timeout=5) as answer:
        page = answer.read().decode()
    found: dict[str, dict[str, float]] = {}
    for part, kind, value in re.findall(
        r'^millrace_engine_step_seconds_(count|sum)\{.*?kind="(\w+)".*?\} (\S+)$', page, re.MULTILINE
    ):
        found.setdefault(kind, {})[part] = float(value)
    return {kind: (int(parts["count"]), parts["sum"]) for kind, parts in found.items()}


def measure(server: Server, name: str, load: Load) -> None:
    """Runs the load and prints a row for each process, and for each kind of step."""
    before, steps_before, began = uses(server), steps(server), time.monotonic()
    run = asyncio.run(run_load(server, name, load, seed=0))
    seconds = time.monotonic() - began
    after, steps_after = uses(server), steps(server)
    num_tokens = load.num_requests * load.output_tokens
    print(f"\nload {name}: {run.output_tokens_per_s:.1f} tokens/s, ITL p99 {run.itl_p99_ms:.1f} ms")
    print("| process | of the machine | CPU ms a token | wake-ups a token |\n|---|---|---|---|")
    cores = psutil.cpu_count() or 1
    for process, use in sorted(after.items(), key=lambda item: -item[1].cpu_s):
        was = before.get(process, Use(0.0, 0))
        cpu_s = use.cpu_s - was.cpu_s
        woken = use.num_switches - was.num_switches
        print(
            f"| {process} | {cpu_s / seconds / cores:.1%} | {1000 * cpu_s / num_tokens:.3f} | "
            f"{woken / num_tokens:.2f} |"
        )
    print("\n| steps | number | of the run | ms each |\n|---|---|---|---|")
    for kind, (count, total_s) in sorted(steps_after.items()):
        was_count, was_s = steps_before.get(kind, (0, 0.0))
        if count > was_count:
            spent_s = total_s - was_s
            each_ms = 1000 * spent_s / (count - was_count)
            print(f"| {kind} | {count - was_count} | {spent_s / seconds:.1%} | {each_ms:.1f} |")


def main() -> None:
    """Starts the stack and measures one load after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--checkpoint", choices=sorted(SHAPES), default="llama-40m")
    parser.add_argument("--ours", choices=sorted(OURS), default="bf16")
    parser.add_argument("--loads", nargs="+", choices=sorted(LOADS), default=["1", "32"])
    parser.add_argument("--quick", action="store_true", help="one request for each place")
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    arguments = parser.parse_args()
    folder = arguments.environments.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = make_checkpoint(arguments.checkpoint, folder)
    with millrace("millrace", checkpoint, folder / "millrace.log", OURS[arguments.ours][0]) as server:
        for name in arguments.loads:
            load = LOADS[name]
            if arguments.quick:
                load = replace(load, num_requests=load.concurrency)
            measure(server, name, load)
        print("\n| process | resident MiB |\n|---|---|")
        for process, num_bytes in sorted(resident_bytes(server).items(), key=lambda item: -item[1]):
            print(f"| {process} | {num_bytes / 2**20:.0f} |")


if __name__ == "__main__":
    main()
