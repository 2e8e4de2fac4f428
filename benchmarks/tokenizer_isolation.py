"""What one tenant's hostile requests do to the Prepare calls of others: nothing, is the aim.

Starts the service and measures well-behaved tenants alone and while another tenant floods it, in turns,
several times over: the machine's own ups and downs fall on both sides. Each calls at fixed times, whatever is
still under way. Prints quantiles of all windows of a kind together, and the ratio of the two of each turn.

The attacker is a process beside that sends again as soon as it is answered. In truth it sits on another
machine: here its messages are serialized before a window begins, which makes it quicker, and it computes only
when nobody else wants to and yields every millisecond (tokenizer_svc.grammar.courtesy), so that the figures
are the service's.

    python -m benchmarks.tokenizer_isolation [--attack schemas] [--turns 5] [--seconds 5] [--json OUT]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
from millrace.tokenizer.v1 import tokenizer_pb2_grpc

from benchmarks.tokenizer_requests import ATTACKS, SECRET, Request, context, good_request
from services.bench.report import machine
from services.channels import CLIENT_OPTIONS
from services.status import from_rpc_error
from tokenizer_svc.grammar.courtesy import Courtesy

_ROOT = Path(__file__).resolve().parent.parent
# Different hostile requests of each kind in one window; sent again when all have been.
_ROUNDS = 8
_PREPARE = "/millrace.tokenizer.v1.TokenizerService/Prepare"
_QUANTILES = (("p50_ms", 0.5), ("p95_ms", 0.95), ("p99_ms", 0.99), ("max_ms", 1.0))
# Latencies of one window by kind of request, in milliseconds.
Latencies = dict[str, list[float]]


def quantile(values: list[float], share: float) -> float:
    """The value below which that share of all lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


async def window(stub: Any, num_tenants: int, rate: float, seconds: float, numbers: Any) -> Latencies:
    """Well-behaved tenants for some seconds, each with so many calls a second."""
    found: Latencies = defaultdict(list)

    async def call(tenant: str) -> None:
        kind, request = good_request(tenant, next(numbers))
        start = time.perf_counter()
        await stub.Prepare(request)
        found[kind].append((time.perf_counter() - start) * 1e3)

    async def behave(index: int) -> None:
        loop = asyncio.get_running_loop()
        # Tenants are out of step with each other.
        due = loop.time() + index / num_tenants / rate
        until = due + seconds
        async with asyncio.TaskGroup() as group:
            while due < until:
                await asyncio.sleep(due - loop.time())
                group.create_task(call(f"tenant-{index}"))
                due += 1 / rate

    gc.collect()
    await asyncio.gather(*map(behave, range(num_tenants)))
    return found


async def flood(target: str, requests: list[tuple[str, bytes]], seconds: float, width: int) -> Counter[str]:
    """So many hostile requests at a time, without a pause; what became of them."""
    outcomes: Counter[str] = Counter()
    waiting = itertools.cycle(requests)
    async with grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS) as channel:
        prepare: Any = channel.unary_unary(_PREPARE)

        async def one_after_the_other() -> None:
            for kind, request in waiting:
                try:
                    await prepare(request)
                    outcomes[f"{kind}: accepted"] += 1
                except grpc.RpcError as error:
                    failure = from_rpc_error(error)
                    outcomes[f"{kind}: {failure.reason} {failure.metadata.get('overrun', '')}".strip()] += 1

        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(one_after_the_other() for _ in range(width))), seconds)
    return outcomes


def attacker(target: str, attack: str, width: int, orders: Connection) -> None:
    """A process of its own that takes only what processor time is left: attackers sit elsewhere, and what
    they compute is not the service's matter.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    courtesy = Courtesy()
    numbers = itertools.count(1_000_000)
    while True:
        rounds = [ATTACKS[attack](next(numbers)) for _ in range(_ROUNDS)]
        requests = [(kind, _signed(request)) for each in rounds for kind, request in each.items()]
        orders.send("ready")
        seconds = orders.recv()
        if not seconds:
            return
        with courtesy:
            outcomes = asyncio.run(flood(target, requests, seconds, width))
        orders.send(dict(outcomes))


def _signed(request: Request) -> bytes:
    request.context.CopyFrom(context("hostile"))
    return request.SerializeToString()


@contextlib.contextmanager
def hostile_process(target: str, attack: str, width: int) -> Iterator[Connection]:
    """The attacker, and the pipe that orders it about."""
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    process = processes.Process(target=attacker, args=(target, attack, width, theirs))
    process.start()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


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
        with hostile_process(target, arguments.attack, arguments.width) as orders:
            return await turns(target, orders, arguments)
    finally:
        process.terminate()
        await process.wait()


async def turns(target: str, orders: Connection, arguments: argparse.Namespace) -> dict[str, Any]:
    """Alone, attacked, alone, attacked, ..."""
    numbers = itertools.count(1)
    alone: list[Latencies] = []
    attacked: list[Latencies] = []
    outcomes: Counter[str] = Counter()
    async with grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS) as channel:
        stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel)

        async def one(seconds: float) -> Latencies:
            return await window(stub, arguments.tenants, arguments.rate, seconds, numbers)

        await one(1.0)
        for _ in range(arguments.turns):
            await asyncio.to_thread(orders.recv)
            # What the attack before has left behind comes to its end.
            await asyncio.sleep(1.0)
            alone.append(await one(arguments.seconds))
            orders.send(arguments.seconds)
            attacked.append(await one(arguments.seconds))
            outcomes.update(await asyncio.to_thread(orders.recv))
        orders.send(0)
    return report(alone, attacked, outcomes)


def report(alone: list[Latencies], attacked: list[Latencies], outcomes: Counter[str]) -> dict[str, Any]:
    """Quantiles of both sides, by kind as well, and the ratio turn by turn."""
    p99s = [
        [quantile(list(itertools.chain(*each.values())), 0.99) for each in side] for side in (alone, attacked)
    ]
    ratios = [under / without for without, under in zip(*p99s, strict=True)]
    return {
        "alone": _summary(alone),
        "under_attack": _summary(attacked),
        "p99_alone_by_turn_ms": [round(each, 2) for each in p99s[0]],
        "p99_under_attack_by_turn_ms": [round(each, 2) for each in p99s[1]],
        "p99_ratio": {
            "median": round(statistics.median(ratios), 2),
            "least": round(min(ratios), 2),
            "most": round(max(ratios), 2),
        },
        "by_kind": {
            kind: {"alone": _summary(alone, kind), "under_attack": _summary(attacked, kind)}
            for kind in alone[0]
        },
        "hostile": dict(sorted(outcomes.items())),
    }


def _summary(windows: list[Latencies], kind: str | None = None) -> dict[str, float]:
    values = [each for found in windows for name in found if kind in (None, name) for each in found[name]]
    return {"calls": len(values), **{name: round(quantile(values, share), 2) for name, share in _QUANTILES}}


def main() -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attack", choices=sorted(ATTACKS), default="schemas", help="what is sent")
    parser.add_argument("--turns", type=int, default=5, help="pairs of windows")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a window")
    parser.add_argument("--tenants", type=int, default=4, help="well-behaved tenants")
    parser.add_argument("--rate", type=float, default=20.0, help="calls of each of them, per second")
    parser.add_argument("--width", type=int, default=8, help="hostile calls at a time")
    parser.add_argument("--json", type=Path, help="write the figures there, beside those of the other attack")
    arguments = parser.parse_args()
    found = asyncio.run(run(arguments))
    print(f"{'Prepare of well-behaved tenants':34}{'alone':>10}{'under attack':>15}{'ratio':>8}")
    rows = {"all": found, **found["by_kind"]}
    for kind, sides in rows.items():
        for key, without in sides["alone"].items():
            under = sides["under_attack"][key]
            print(f"{kind + ' ' + key:34}{without:>10}{under:>15}{under / without:>8.2f}")
    print("p99 alone, turn by turn:       ", found["p99_alone_by_turn_ms"])
    print("p99 under attack, turn by turn:", found["p99_under_attack_by_turn_ms"])
    print("ratio of the two:              ", found["p99_ratio"])
    print("outcomes of hostile calls:     ", found["hostile"])
    if arguments.json:
        kept = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
        attacks = {**kept.get("attacks", {}), arguments.attack: found}
        settings = {
            name: getattr(arguments, name) for name in ("turns", "seconds", "tenants", "rate", "width")
        }
        written = {"machine": machine(), **settings, "attacks": attacks}
        arguments.json.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
