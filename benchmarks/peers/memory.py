"""Memory of our whole stack beside peers that hold the same tokens, and which of our processes takes it.

`python -m benchmarks.peers.memory [--checkpoint qwen3-0.6b] [--ours bf16 w8a8] [--peers openvino]
    [--requests 32] [--environments DIR] [--json OUT]`

Each server runs alone, with the same capacity of 4 GiB for keys and values. It answers the same requests of
256 + 16 tokens twice, with other prompts the second time, after a few to warm up: what was added then is what
the cache takes for so many tokens, in the precision that the server keeps them in. "beside the cache" is the
rest. Pages that several processes share are counted once (PSS); "as each says" adds up what every process
calls resident (RSS), which counts libraries as often as there are processes. The peak is the most that all
processes took together at any time (PSS, four looks a second), those that only load included.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from benchmarks.engine.report import options, publish
from benchmarks.peers.__main__ import PEERS, run_load
from benchmarks.peers.checkpoints import SHAPES, make_checkpoint
from benchmarks.peers.loads import Load
from benchmarks.peers.millrace import millrace
from benchmarks.peers.servers import Server, serve
from benchmarks.peers.tables import OURS

_MIB = 2**20
_LOOK_S = 0.25


@dataclass(frozen=True)
class Resident:
    """Bytes of one or more processes."""

    # Pages of several processes by share, pages of this one alone, and all pages.
    pss: int = 0
    uss: int = 0
    rss: int = 0

    def __add__(self, other: Resident) -> Resident:
        return Resident(self.pss + other.pss, self.uss + other.uss, self.rss + other.rss)


class Peak:
    """The most that all processes which this one started took together, while the context lasts."""

    def __init__(self) -> None:
        self.bytes = 0
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Peak:
        self._watch.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._watch.join()

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_S):
            children = psutil.Process().children(recursive=True)
            self.bytes = max(self.bytes, sum(_pss(child.pid) for child in children))


def _pss(pid: int) -> int:
    """0 of a process that ended."""
    try:
        told = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Pss:\s+(\d+) kB", told, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def by_process(server: Server) -> dict[str, Resident]:
    """Memory of the server's processes; equal names are added up."""
    found: dict[str, Resident] = {}
    for process in [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]:
        name = name_of(process)
        found[name] = found.get(name, Resident()) + _resident(process)
    return found


def name_of(process: psutil.Process) -> str:
    """The module that a Python process runs, else its program."""
    words = process.cmdline()
    if "-m" in words:
        return words[words.index("-m") + 1]
    name = Path(words[0]).name if words else str(process.pid)
    return Path(words[1]).name if name.startswith("python") and len(words) > 1 else name


def _resident(process: psutil.Process) -> Resident:
    memory = process.memory_full_info()
    return Resident(memory.pss, memory.uss, memory.rss)


def _total(server: Server) -> Resident:
    return sum(by_process(server).values(), Resident())


def measure(server: Server, load: Load) -> tuple[dict[str, str | float], dict[str, Resident]]:
    """A row of MiB, and the processes after everything."""
    ready = _total(server)
    warm = replace(load, num_requests=load.concurrency)
    asyncio.run(run_load(server, "memory", warm, seed=2))
    asyncio.run(run_load(server, "memory", load, seed=0))
    first = _total(server)
    asyncio.run(run_load(server, "memory", load, seed=1))
    processes = by_process(server)
    second = sum(processes.values(), Resident())
    num_tokens, num_warm = (
        each.num_requests * (each.input_tokens + each.output_tokens) for each in (load, warm)
    )
    token_bytes = (second.pss - first.pss) / num_tokens
    held = 2 * num_tokens + num_warm
    row: dict[str, str | float] = {
        "server": server.name,
        "ready": ready.pss / _MIB,
        f"{held} tokens held": second.pss / _MIB,
        "KiB a token": token_bytes / 1024,
        "beside the cache": (second.pss - held * token_bytes) / _MIB,
        "as each says": second.rss / _MIB,
    }
    return row, processes


def _servers(
    arguments: argparse.Namespace, folder: Path, checkpoint: Path
) -> Sequence[AbstractContextManager[Server]]:
    ours = [
        millrace(f"millrace-{name}", checkpoint, folder / f"millrace-{name}.log", OURS[name][0])
        for name in arguments.ours
    ]
    peers = [serve(name, PEERS[name](folder, checkpoint), folder / f"{name}.log") for name in arguments.peers]
    return [*ours, *peers]


def main() -> None:
    """Starts one server after the other; prints a row for each, and our processes."""
    parser = options(__doc__)
    parser.add_argument("--checkpoint", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--ours", nargs="*", choices=sorted(OURS), default=["bf16", "w8a8"])
    parser.add_argument("--peers", nargs="*", choices=sorted(PEERS), default=["openvino"])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    arguments = parser.parse_args()
    folder = arguments.environments.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = make_checkpoint(arguments.checkpoint, folder)
    load = Load(concurrency=8, num_requests=arguments.requests, output_tokens=16)
    rows, lines = [], []
    for starting in _servers(arguments, folder, checkpoint):
        with Peak() as peak, starting as server:
            row, processes = measure(server, load)
        rows.append(row | {"peak": peak.bytes / _MIB})
        shares = sorted(processes.items(), key=lambda item: -item[1].pss)
        parts = ", ".join(f"{name} {each.pss / _MIB:.0f} ({each.uss / _MIB:.0f})" for name, each in shares)
        lines.append(f"{server.name}, by process, and what no other shares: {parts}")
    title = f"{arguments.checkpoint}: MiB resident, pages of several processes counted once"
    publish(title, rows, arguments.json, "\n".join(lines))


if __name__ == "__main__":
    main()
