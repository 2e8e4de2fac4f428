"""What one tenant's attacks do to another tenant's answers: nothing, is the aim.

Starts the whole stack with the bundled model. A neighbour streams short answers at fixed moments, over one
window before the first attack, one under each, and one after it. Each attack is driven by a process of the
lowest priority: in truth it sits on another machine. Told are the neighbour's time to the first token and the
gaps between its tokens, how many requests it lost, what became of the attacker's, and the memory of every
process before, under and after. The aims are 250 ms to the first token and 100 ms between two, both at the
99th percentile.

    python -m benchmarks.neighbour [--attack NAME ...] [--quick] [--json OUT]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
from collections.abc import Iterator
from typing import Any

import psutil

from benchmarks.engine.report import options, percentile
from benchmarks.neighbour.attacks import ATTACKS, drive
from benchmarks.neighbour.requests import CHAT, Target
from benchmarks.neighbour.tenants import CONFIG, KEYS
from benchmarks.stack import RunningStack, running_stack, write_result
from services.bench.client import BenchTarget, Client
from services.bench.records import RequestRecord
from services.bench.workload import PlannedRequest

TTFT_AIM_MS, GAP_AIM_MS = 250.0, 100.0
_EVERY_S = 0.125
_TOKENS = 24
_TIMEOUT_S = 15.0
# What the attack before has left behind comes to its end.
_PAUSE_S = 2.0


class Window:
    """What the neighbour saw over some seconds, in milliseconds."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        # How late a request was begun at most: what the machine did to the neighbour itself.
        self.late_ms = 0.0

    def summary(self) -> dict[str, float]:
        """The figures of the table."""
        # A stream that was cut has shown its times up to then.
        begun = [record for record in self.records if record.chunk_times_s]
        ttft_ms = [record.ttft_s * 1e3 for record in begun]
        gaps_ms = [gap_s * 1e3 for record in begun for gap_s in record.itls_s]
        return {
            "requests": len(self.records),
            "lost": sum(not record.ok for record in self.records),
            "ttft_p50_ms": round(percentile(ttft_ms or [0.0], 0.5), 1),
            "ttft_p99_ms": round(percentile(ttft_ms or [0.0], 0.99), 1),
            "gap_p99_ms": round(percentile(gaps_ms or [0.0], 0.99), 1),
            "gap_max_ms": round(percentile(gaps_ms or [0.0], 1.0), 1),
            "begun_late_ms": round(self.late_ms, 1),
        }


def _steal_ms() -> float:
    """Time that the host of this machine has given to others so far; 0 where that is not known."""
    return 1e3 * float(getattr(psutil.cpu_times(), "steal", 0.0))


def _question(model: str, number: int) -> PlannedRequest:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"What is {number} plus {number}?"}],
        "max_tokens": _TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    content = json.dumps(body).encode()
    return PlannedRequest(index=number, start_s=0.0, tier="", path=CHAT, body=content, prompt_tokens=0)


async def _window(target: Target, seconds: float) -> Window:
    """The neighbour's requests at fixed moments, whatever is still under way."""
    window, loop = Window(), asyncio.get_running_loop()
    client = Client(BenchTarget.parse(f"http://{target.authority()}", target.key), limit_s=_TIMEOUT_S)

    async def ask(number: int) -> None:
        window.records.append(await client.run(_question(target.model, number)))

    due_s = loop.time()
    until_s = due_s + seconds
    number = 0
    async with asyncio.TaskGroup() as group:
        while due_s < until_s:
            await asyncio.sleep(due_s - loop.time())
            window.late_ms = max(window.late_ms, (loop.time() - due_s) * 1e3)
            number += 1
            group.create_task(ask(number))
            due_s += _EVERY_S
    await client.close()
    return window


def _families(stack: RunningStack) -> Iterator[tuple[str, list[psutil.Process]]]:
    """Each process that lives, with its children."""
    for name, pid in stack.pids().items():
        try:
            process = psutil.Process(pid)
            family = [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        yield name, family


def _memory(stack: RunningStack) -> dict[str, float]:
    """Megabytes of each process and its children, shared pages by share."""
    return {name: round(sum(map(_pss, family)) / 1e6, 1) for name, family in _families(stack)}


def _processor_s(stack: RunningStack) -> dict[str, float]:
    """Processor time of each process and its children so far."""
    return {name: sum(map(_worked_s, family)) for name, family in _families(stack)}


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.NoSuchProcess:
        return 0


def _worked_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _targets(stack: RunningStack) -> tuple[Target, Target]:
    host, _, port = stack.state.address.rpartition(":")
    neighbour, attacker = (Target(host, int(port), key, stack.state.model) for key in KEYS.values())
    return neighbour, attacker


async def _measure(stack: RunningStack, name: str, seconds: float) -> dict[str, Any]:
    neighbour, attacker = _targets(stack)
    pids, memory = stack.pids(), _memory(stack)
    before = await _window(neighbour, seconds / 2)
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    process = processes.Process(target=drive, args=(name, attacker, seconds, theirs))
    process.start()
    theirs.close()
    try:
        await asyncio.to_thread(ours.recv)
        ours.send("go")
        stolen_ms, worked_s = -_steal_ms(), _processor_s(stack)
        under = await _window(neighbour, seconds)
        stolen_ms += _steal_ms()
        processor_s = {name: at_s - worked_s.get(name, 0.0) for name, at_s in _processor_s(stack).items()}
        peak = _memory(stack)
        outcomes = await asyncio.to_thread(ours.recv)
    finally:
        process.kill()
        process.join()
    await asyncio.sleep(_PAUSE_S)
    after = await _window(neighbour, seconds / 2)
    restarted = [each for each, pid in stack.pids().items() if pids.get(each) != pid]
    return {
        "attack": name,
        "seconds": seconds,
        "before": before.summary(),
        "under": under.summary(),
        "after": after.summary(),
        "memory_mb": {"before": memory, "under": peak, "after": _memory(stack)},
        "processor_s": {name: round(spent_s, 2) for name, spent_s in processor_s.items()},
        "outcomes": outcomes,
        "steal_ms": round(stolen_ms, 1),
        "restarted": restarted,
    }


def _grown_most(memory: dict[str, dict[str, float]], but: str) -> tuple[str, float]:
    """The other process that grew most, under the attack or after it, and by how much."""
    grown_mb = {
        name: max(memory[when].get(name, 0.0) for when in ("under", "after")) - before_mb
        for name, before_mb in memory["before"].items()
        if name != but
    }
    return max(grown_mb.items(), key=lambda each: each[1])


def row(found: dict[str, Any]) -> str:
    before, under, after = found["before"], found["under"], found["after"]
    memory = found["memory_mb"]
    answers = [f"{name} x {count}" for name, count in sorted(found["outcomes"].items())]
    if "killed" in found:
        answers.append(f"processes of the stack killed: {found['killed']}")
    gateway = next(name for name in memory["before"] if name.startswith("gateway"))
    other, grown_mb = _grown_most(memory, gateway)
    cells = [
        found["attack"],
        f"{before['ttft_p99_ms']:.0f} / {under['ttft_p99_ms']:.0f} / {after['ttft_p99_ms']:.0f}",
        f"{before['gap_p99_ms']:.0f} / {under['gap_p99_ms']:.0f} / {after['gap_p99_ms']:.0f}",
        f"{under['gap_max_ms']:.0f}",
        f"{under['lost']} of {under['requests']}",
        " / ".join(f"{memory[when].get(gateway, 0.0):.0f}" for when in ("before", "under", "after")),
        f"{other} {grown_mb:+.0f}",
        ", ".join(answers),
    ]
    return "| " + " | ".join(cells) + " |"


_COLUMNS = (
    *("attack", "TTFT p99, ms", "gaps p99, ms", "worst gap", "lost"),
    *("gateway, MB", "grew most beside it, MB", "the attacker's answers"),
)
TABLE = f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}"


def main() -> None:
    """Prints the table as it grows."""
    parser = options(__doc__)
    parser.add_argument("--attack", nargs="*", choices=list(ATTACKS), metavar="NAME", help="one or several")
    parser.add_argument("--seconds", type=float, default=12.0, help="length of an attack")
    parser.add_argument("--quick", action="store_true", help="4 seconds each")
    chosen = parser.parse_args()
    seconds = 4.0 if chosen.quick else chosen.seconds
    found: list[dict[str, Any]] = []
    with running_stack(CONFIG) as stack:
        print(TABLE, flush=True)
        for name in chosen.attack or ATTACKS:
            found.append(asyncio.run(_measure(stack, name, seconds)))
            print(row(found[-1]), flush=True)
            if found[-1]["restarted"]:
                print(f"started again: {found[-1]['restarted']}", flush=True)
            _keep(chosen, found)


def _keep(options: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    """Writes what there is so far: it takes a quarter of an hour."""
    if options.json is not None and options.json.exists():
        found = _beside(json.loads(options.json.read_text())["attacks"], found)
    aims = {"ttft_p99_ms": TTFT_AIM_MS, "gap_p99_ms": GAP_AIM_MS}
    write_result(options.json, {"aims": aims, "attacks": found})


def _beside(earlier: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was found before of other attacks, in the attacks' order."""
    rows = {each["attack"]: each for each in [*earlier, *found]}
    return [rows[name] for name in ATTACKS if name in rows]


if __name__ == "__main__":
    main()
