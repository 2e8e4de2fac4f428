"""Processes stand still (SIGSTOP) under running streams: the part of `benchmarks.chaos` behind --stop."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence

import psutil
from sqlalchemy import create_engine, func, select

from benchmarks.answers import Clients, Observed
from benchmarks.stack import RunningStack, running_stack, write_result
from gateway.ledger.tables import REQUESTS
from services.supervisor.config import BUNDLED_MODEL

CONFIG = """
[supervisor]
restart_delay_s = 0.2
max_restart_delay_s = 1.0
[engine.simulation]
step_ms = 50.0
"""
KINDS = ("front", "core", "tokenizer", "worker", "gateway", "envoy")
# Places where a control token might be spelled: so many of them are a worker's to look at.
NUM_SPELLINGS = 8_400
LEDGER_LIMIT_S = 10.0
# Rates measured on short prompts would refuse the long ones.
ADMISSION = """
[engine.scheduler]
refuse_early = false
"""


def victims(stack: RunningStack, kind: str, num: int, num_each: int) -> list[int]:
    """Process ids of `num` of a kind, or of as many as there are: `num_each` engines and gateways."""
    pids = stack.pids()
    match kind:
        case "front" | "core":
            fronts = [pids[f"engine-{index}"] for index in range(num_each)]
            found = [child.pid for pid in fronts for child in psutil.Process(pid).children()[:1]]
            found = fronts if kind == "front" else found
        case "gateway":
            found = [pids[f"gateway-{index}"] for index in range(num_each)]
        case "worker":
            (original,) = psutil.Process(pids["tokenizer"]).children()
            # Whoever has worked last works next, which is the newest at first.
            found = sorted((each.pid for each in original.children()), reverse=True)
        case _:
            found = [pids[kind]]
    return found[:num]


def ledger_tokens(stack: RunningStack, column: str = "completion_tokens") -> int:
    """Tokens of every request in the ledger."""
    with create_engine(stack.ledger_url).connect() as connection:
        return connection.execute(select(func.sum(REQUESTS.c[column]))).scalar() or 0


def in_no_row(stack: RunningStack) -> int:
    """What the engines that run have computed, by their own count, and no row of the ledger has."""
    return computed_tokens(stack) - ledger_tokens(stack) - ledger_tokens(stack, "unclaimed_tokens")


def computed_tokens(stack: RunningStack) -> int:
    """What the engines that run count themselves; one that is started again begins at 0."""
    return round(stack.counter("engine", "millrace_engine_generated_tokens_total"))


async def written(is_complete: Callable[[], bool]) -> None:
    """Waits for the ledger, not for ever."""
    ends_s = time.monotonic() + LEDGER_LIMIT_S
    while not is_complete() and time.monotonic() < ends_s:
        await asyncio.sleep(0.1)


async def stop_one_kind(stack: RunningStack, kind: str, options: argparse.Namespace) -> dict[str, object]:
    """Reference, then one stop under streams; the figures of it."""
    filler = "<" * NUM_SPELLINGS if kind == "worker" else ""
    clients = Clients(
        stack, options.streams, options.tokens, filler=filler, continues=options.clients_continue
    )
    before, unknown_before = ledger_tokens(stack), in_no_row(stack)
    unclaimed_before = ledger_tokens(stack, "unclaimed_tokens")
    is_counted = kind not in {"front", "core"}
    expected = await clients.ask_all()
    for each in expected:
        if each.error:
            raise SystemExit(f"an answer before anything was stopped failed: {each.error}")
    observed = Observed()
    asking = asyncio.create_task(clients.ask_until(time.monotonic() + options.seconds, expected, observed))
    # All have begun by then, and have not ended.
    await asyncio.sleep(options.seconds / 10)
    stopped = victims(stack, kind, options.victims, options.each)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    waking = asyncio.create_task(wake(stopped, options.stop_seconds))
    await asking
    await waking
    await clients.close()
    got = sum(each.completion_tokens for each in expected) + observed.num_tokens
    await written(lambda: ledger_tokens(stack) - before == got)
    await written(lambda: not is_counted or in_no_row(stack) == unknown_before)
    return {
        "stopped": f"{len(stopped)} {kind}",
        "seconds": options.stop_seconds,
        "streams": sum(observed.outcomes.values()),
        **{name: observed.outcomes[name] for name in ("identical", "different", "lost", "refused")},
        "continued_by_clients": clients.num_continued,
        "longest_pause_s": round(max(observed.gaps_s), 2),
        "longest_first_chunk_s": round(max(observed.first_s), 2),
        "tokens": got,
        "ledger_minus_tokens": ledger_tokens(stack) - before - got,
        # Computed for a gateway that was gone.
        "unclaimed_tokens": ledger_tokens(stack, "unclaimed_tokens") - unclaimed_before,
        # Of whole engines: their own count, which another process goes on with at 0.
        "computed_and_in_no_row": in_no_row(stack) - unknown_before if is_counted else None,
        "errors": dict(observed.errors),
    }


async def wake(pids: Sequence[int], after_s: float) -> None:
    """Lets those go on that have not been replaced."""
    await asyncio.sleep(after_s)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def served(options: argparse.Namespace) -> tuple[str, ...]:
    """The model of a stack, as arguments."""
    return ("--model", str(BUNDLED_MODEL)) if options.bundled else ("--simulated",)


def stop_all_kinds(options: argparse.Namespace) -> None:
    """Prints a line for each kind as it is done."""
    num = str(options.each)
    rows = []
    with running_stack(CONFIG + ADMISSION, "--engines", num, "--gateways", num, *served(options)) as stack:
        for kind in options.kinds.split(","):
            rows.append(asyncio.run(stop_one_kind(stack, kind, options)))
            print(*(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
    write_result(options.json, {"seconds_stopped": options.stop_seconds, "rows": rows})
