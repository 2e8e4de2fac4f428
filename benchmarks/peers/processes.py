"""Which process of our stack takes how much of the machine while it serves a load.

`python -m benchmarks.peers.processes [--checkpoint llama-40m] [--ours bf16] [--loads 1 32] [--quick]
    [--environments DIR]`

Everything beside the core takes cycles from the threads that compute: these rows say how many.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
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


def measure(server: Server, name: str, load: Load) -> None:
    """Runs the load and prints a row for each process."""
    before, began = uses(server), time.monotonic()
    run = asyncio.run(run_load(server, name, load, seed=0))
    seconds = time.monotonic() - began
    after = uses(server)
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


if __name__ == "__main__":
    main()
