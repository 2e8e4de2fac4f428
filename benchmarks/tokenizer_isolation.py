"""What one tenant's hostile requests do to the Prepare calls of others: nothing, is the aim.

Starts the service and measures well-behaved tenants in turns, several times over: alone, while another tenant
floods the service, and while the same messages go elsewhere; so the machine's own ups and downs fall on all
sides. Each calls at fixed times, whatever is still under way. Prints quantiles of all windows of a kind
together, and ratios: of those quantiles ("pooled") and of each turn. A p99 is a few calls: pooled, one bad
second decides; the median of the turns does not see it. Hence both, and the turns one by one.

Calls come as from gateways, small and large ones each on a stream (`--over unary`: each by itself). The
attacker is a process beside, like another gateway, that sends again as soon as it is answered. In truth it
sits on another machine: here its messages are serialized before a window begins, which makes it quicker, and
it computes only when nobody else wants to, and yields. What it takes all the same shows in the third kind
of window, "sent elsewhere": it sends the same messages to a process that does nothing but refuse, at the pace
at which the service has answered them. That process takes only what is left as well. So what the service
itself lets an attack do is the ratio of "under attack" to "sent elsewhere".

What neither side can help is shown by window, not taken out: time that the machine's host gave to others
("steal", of all cores together), and how late the benchmark's own calls were begun at most. Where all the
machine stood still, both are large. The ratios of turns that lost less than 1 % of a core stand apart.

    python -m benchmarks.tokenizer_isolation [--attack schemas] [--turns 5] [--seconds 4] [--json OUT]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
from millrace.tokenizer.v1 import tokenizer_pb2_grpc

from benchmarks.tokenizer_attacker import WAYS, Hostile, hostile
from benchmarks.tokenizer_requests import ATTACKS, SECRET, Request, good_request
from gateway.tokenizer.stream import PrepareStreams
from runtime.channels import CLIENT_OPTIONS
from services.bench.report import machine

_ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_S = 20.0
# What the attack before has left behind comes to its end.
_PAUSE_S = 1.0
_SIDES = ("alone", "under_attack", "sent_elsewhere")
# What is divided by what.
_RATIOS = {
    "p99_ratio": ("under_attack", "alone"),
    "p99_ratio_sent_elsewhere": ("sent_elsewhere", "alone"),
    "p99_ratio_of_the_service": ("under_attack", "sent_elsewhere"),
}
# Of the time of a window and one core: what the host may have taken of a turn that counts as undisturbed.
_MAX_STEAL = 0.01
_QUANTILES = (("p50_ms", 0.5), ("p95_ms", 0.95), ("p99_ms", 0.99), ("max_ms", 1.0))
# Latencies by kind of request, in milliseconds.
Latencies = dict[str, list[float]]
Prepare = Callable[[Request], Awaitable[Any]]


@dataclasses.dataclass
class Window:
    """What was measured in some seconds."""

    latencies: Latencies = dataclasses.field(default_factory=lambda: defaultdict(list))
    # How late a call was begun at most, in milliseconds.
    late_ms: float = 0.0
    # Time of all cores that the host gave to others.
    steal_ms: float = 0.0

    @property
    def p99_ms(self) -> float:
        """Of all calls."""
        return quantile(list(itertools.chain(*self.latencies.values())), 0.99)


def quantile(values: list[float], share: float) -> float:
    """The value below which that share of all lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


@contextlib.asynccontextmanager
async def preparing(way: str, target: str) -> AsyncIterator[Prepare]:
    """Calls of well-behaved tenants, as gateways make them or one by one."""
    if way == "unary":
        async with grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS) as channel:
            yield tokenizer_pb2_grpc.TokenizerServiceStub(channel).Prepare
        return
    streams = PrepareStreams(target)

    async def prepare(request: Request) -> Any:
        return await streams.call(request.SerializeToString(), "", "", _TIMEOUT_S)

    try:
        yield prepare
    finally:
        await streams.close()


def steal_ms() -> float:
    """Time that the host of this machine has given to others so far; 0 where that is not known."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split(maxsplit=9)
    except OSError:
        return 0.0
    return int(fields[8]) * 1e3 / os.sysconf("SC_CLK_TCK")


async def window(prepare: Prepare, num_tenants: int, rate: float, seconds: float, numbers: Any) -> Window:
    """Well-behaved tenants for some seconds, each with so many calls a second."""
    found = Window(steal_ms=-steal_ms())

    async def call(tenant: str) -> None:
        kind, request = good_request(tenant, next(numbers))
        start = time.perf_counter()
        await prepare(request)
        found.latencies[kind].append((time.perf_counter() - start) * 1e3)

    async def behave(index: int) -> None:
        loop = asyncio.get_running_loop()
        # Tenants are out of step with each other.
        due = loop.time() + index / num_tenants / rate
        until = due + seconds
        async with asyncio.TaskGroup() as group:
            while due < until:
                await asyncio.sleep(due - loop.time())
                found.late_ms = max(found.late_ms, (loop.time() - due) * 1e3)
                group.create_task(call(f"tenant-{index}"))
                due += 1 / rate

    await asyncio.gather(*map(behave, range(num_tenants)))
    found.steal_ms += steal_ms()
    return found


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All windows against a service of our own."""
    environment = {
        **os.environ,
        "MILLRACE_SECURITY__CONTEXT_SECRET": SECRET,
        "MILLRACE_TOKENIZER__LISTEN": "127.0.0.1:0",
        "MILLRACE_MODEL__PATH": str(_ROOT / "models" / "millrace-nano"),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tokenizer_svc", env=environment, stdout=asyncio.subprocess.PIPE, cwd=_ROOT
    )
    try:
        assert process.stdout is not None
        target = (await process.stdout.readline()).decode().partition("grpc=")[2].split()[0]
        with hostile(arguments.over, arguments.attack, arguments.width) as attacker:
            return await turns(target, attacker, arguments)
    finally:
        process.terminate()
        await process.wait()


async def turns(target: str, attacker: Hostile, arguments: argparse.Namespace) -> dict[str, Any]:
    """Alone, attacked, sent elsewhere, alone, ..."""
    numbers = itertools.count(1)
    windows: dict[str, list[Window]] = {side: [] for side in _SIDES}
    outcomes: Counter[str] = Counter()
    seconds = arguments.seconds
    async with preparing(arguments.over, target) as prepare:

        async def one(kind: str, length_s: float) -> None:
            found = await window(prepare, arguments.tenants, arguments.rate, length_s, numbers)
            windows.setdefault(kind, []).append(found)

        await one("first", 1.0)
        for _ in range(arguments.turns):
            await attacker.ready()
            await asyncio.sleep(_PAUSE_S)
            gc.collect()
            await one("alone", seconds)
            attacker.attack(target, seconds)
            await one("under_attack", seconds)
            became = await attacker.outcomes()
            outcomes.update(became)
            await attacker.ready()
            await asyncio.sleep(_PAUSE_S)
            gc.collect()
            attacker.attack_nothing(seconds, became.total())
            await one("sent_elsewhere", seconds)
            await attacker.outcomes()
        await attacker.ready()
    del windows["first"]
    return report(windows, outcomes, seconds)


def report(windows: dict[str, list[Window]], outcomes: Counter[str], seconds: float) -> dict[str, Any]:
    """Quantiles of all sides, by kind as well, and the ratios."""
    sides = {side: _summary(found) for side, found in windows.items()}
    kinds = windows["alone"][0].latencies
    return {
        **sides,
        "p99_by_turn_ms": _by_turn(windows, lambda each: each.p99_ms),
        "steal_by_turn_ms": _by_turn(windows, lambda each: each.steal_ms),
        "latest_by_turn_ms": _by_turn(windows, lambda each: each.late_ms),
        **{name: _ratios(windows, *of, seconds) for name, of in _RATIOS.items()},
        "by_kind": {kind: {side: _summary(found, kind) for side, found in windows.items()} for kind in kinds},
        "hostile": dict(sorted(outcomes.items())),
    }


def _by_turn(windows: dict[str, list[Window]], value: Callable[[Window], float]) -> dict[str, list[float]]:
    return {side: [round(value(each), 2) for each in found] for side, found in windows.items()}


def _ratios(windows: dict[str, list[Window]], above: str, below: str, seconds: float) -> dict[str, Any]:
    pooled = [_summary(windows[side])["p99_ms"] for side in (above, below)]
    turns = list(zip(windows[above], windows[below], strict=True))
    ratios = [one.p99_ms / other.p99_ms for one, other in turns]
    most_ms = _MAX_STEAL * seconds * 1e3
    calm = [
        ratio for ratio, turn in zip(ratios, turns, strict=True) if max(w.steal_ms for w in turn) <= most_ms
    ]
    found = {
        "pooled": pooled[0] / pooled[1],
        "median": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "undisturbed_median": statistics.median(calm) if calm else None,
        "undisturbed_turns": len(calm),
    }
    return {name: each if each is None else round(each, 2) for name, each in found.items()}


def _summary(windows: list[Window], kind: str | None = None) -> dict[str, float]:
    values = [
        each
        for found in windows
        for name, latencies in found.latencies.items()
        if kind in (None, name)
        for each in latencies
    ]
    return {"calls": len(values), **{name: round(quantile(values, share), 2) for name, share in _QUANTILES}}


def main() -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--over", choices=sorted(WAYS), default="stream", help="how calls come")
    parser.add_argument("--attack", choices=sorted(ATTACKS), default="schemas", help="what is sent")
    parser.add_argument("--turns", type=int, default=5, help="pairs of windows")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a window")
    parser.add_argument("--tenants", type=int, default=4, help="well-behaved tenants")
    parser.add_argument("--rate", type=float, default=20.0, help="calls of each of them, per second")
    parser.add_argument("--width", type=int, default=8, help="hostile calls at a time")
    parser.add_argument("--json", type=Path, help="write the figures there, beside those of other attacks")
    arguments = parser.parse_args()
    found = asyncio.run(run(arguments))
    print(f"{'Prepare of well-behaved tenants':34}{'alone':>10}{'under attack':>15}{'sent elsewhere':>16}")
    rows = {"all": {side: found[side] for side in _SIDES}, **found["by_kind"]}
    for kind, row in rows.items():
        for key in row["alone"]:
            alone, attacked, elsewhere = (row[side][key] for side in _SIDES)
            print(f"{kind + ' ' + key:34}{alone:>10}{attacked:>15}{elsewhere:>16}")
    for side in _SIDES:
        p99s, steal, latest = (found[f"{what}_by_turn_ms"][side] for what in ("p99", "steal", "latest"))
        print(f"{side}, by turn: p99 {p99s} ms; steal {steal} ms; begun late by at most {latest} ms")
    for name, (above, below) in _RATIOS.items():
        print(f"p99 {above} / {below}: ".replace("_", " "), found[name])
    print("outcomes of hostile calls: ", found["hostile"])
    if arguments.json:
        kept = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
        attacks = {**kept.get("attacks", {}), arguments.attack: found}
        settings = {
            name: getattr(arguments, name)
            for name in ("over", "turns", "seconds", "tenants", "rate", "width")
        }
        written = {"machine": machine(), **settings, "attacks": attacks}
        arguments.json.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
