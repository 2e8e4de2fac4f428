"""Engines die by SIGKILL, one after another, under running streams: does a client notice more than a pause?

`python -m benchmarks.chaos [--seconds 120] [--bundled] [--ranks 2]`
`python -m benchmarks.chaos --stop [--seconds 30] [--stop-seconds 75] [--victims 1] [--each 2] [--kinds core]`

Starts a whole stack with three engines (simulated, or the bundled model with --bundled). Every client asks
the same greedy question again and again; what the answer is was found out before, undisturbed, and once more
as a control. Then one engine is killed every ten seconds, in turn, and the supervisor starts it again. Every
answer whose stream began must arrive whole and equal, byte for byte. The longest pause is the longest time
that a client waited for the next chunk of a stream that had begun. With --ranks each engine is so many
processes with a part of the bundled model each, and the last of these is killed instead.

With --stop processes are stopped (SIGSTOP) instead, in a stack with two engines and two gateways (--each):
one kind after another, each once. The ledger's tokens, and what engines computed, are compared with what
clients got. A gateway's streams end with it, and Envoy's: with --clients-continue their clients ask for the
rest of what they have, as docs/operations.md says.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import time

import psutil

from benchmarks.answers import Clients, Observed
from benchmarks.chaos_stop import CONFIG, KINDS, served, stop_all_kinds
from benchmarks.engine.report import options
from benchmarks.stack import RunningStack, running_stack, write_result

NUM_ENGINES = 3
KILL_EVERY_S = 10.0


def last_rank(front: int) -> int | None:
    """The process of the last rank of this front's engine; None before it has any."""
    ranks = [
        each.pid
        for each in psutil.Process(front).children(recursive=True)
        if "engine.runner.ranks.worker" in each.cmdline()
    ]
    return max(ranks, default=None)


async def kill_engines(stack: RunningStack, num_ranks: int, end_s: float) -> int:
    """Kills one engine every KILL_EVERY_S, in turn; returns how many. One that is not back yet is spared."""
    killed: dict[str, int | None] = {}
    num_kills = 0
    while time.monotonic() + KILL_EVERY_S < end_s:
        await asyncio.sleep(KILL_EVERY_S)
        name = f"engine-{num_kills % NUM_ENGINES}"
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            front = stack.pids()[name]
            pid = last_rank(front) if num_ranks > 1 else front
            if pid is None or killed.get(name) == pid:
                continue
            os.kill(pid, signal.SIGKILL)
            killed[name] = pid
            num_kills += 1
    return num_kills


async def run(stack: RunningStack, chosen: argparse.Namespace) -> dict[str, object]:
    """Reference, control, chaos; the figures of all three."""
    num_streams, num_tokens, seconds = chosen.streams, chosen.tokens, chosen.seconds
    clients = Clients(stack, num_streams, num_tokens)
    expected = await clients.ask_all()
    whole = sum(not each.error and each.completion_tokens == num_tokens for each in expected)
    control = await clients.ask_all()
    observed = Observed()
    end_s = time.monotonic() + seconds
    killing = asyncio.create_task(kill_engines(stack, chosen.ranks, end_s))
    await clients.ask_until(end_s, expected, observed)
    num_kills = await killing
    await clients.close()
    gaps_s = sorted(observed.gaps_s)
    return {
        "engines": NUM_ENGINES,
        "ranks": chosen.ranks,
        "concurrent_streams": num_streams,
        "tokens_per_stream": num_tokens,
        "seconds": seconds,
        "reference_whole": whole,
        "control_identical": sum(pair[0] == pair[1] for pair in zip(expected, control, strict=True)),
        "kills": num_kills,
        "continuations": int(stack.counter("gateway", "millrace_resubmissions_total", 'outcome="continued"')),
        "streams": sum(observed.outcomes.values()),
        **{name: observed.outcomes[name] for name in ("identical", "different", "lost", "refused")},
        "errors": dict(observed.errors),
        "tokens": observed.num_tokens,
        "largest_logprob_change": observed.largest_logprob_change,
        "chunk_gap_p50_ms": round(gaps_s[len(gaps_s) // 2] * 1000, 1),
        "chunk_gap_p999_ms": round(gaps_s[int(len(gaps_s) * 0.999)] * 1000, 1),
        "longest_pause_ms": round(gaps_s[-1] * 1000, 1),
    }


def main() -> None:
    """Prints the figures, and writes them as JSON with --json."""
    parser = options(__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=120, help="of every answer")
    parser.add_argument("--bundled", action="store_true", help="the model of this repository, not simulated")
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the bundled model")
    parser.add_argument("--stop", action="store_true", help="stop processes instead of killing engines")
    parser.add_argument("--stop-seconds", type=float, default=75.0, help="they would go on after so long")
    parser.add_argument("--each", type=int, default=2, help="engines, and gateways, of a stack for --stop")
    parser.add_argument("--victims", type=int, default=1, help="processes of each kind that are stopped")
    parser.add_argument(
        "--clients-continue", action="store_true", help="with --stop: who was cut asks for the rest"
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help="what is stopped, in this order")
    chosen = parser.parse_args()
    if chosen.stop:
        stop_all_kinds(chosen)
        return
    config = CONFIG
    if chosen.ranks > 1:
        chosen.bundled = True
        config += f"[engine]\nnum_threads = {chosen.ranks}\n[engine.parallel]\ntensor = {chosen.ranks}\n"
    with running_stack(config, "--engines", str(NUM_ENGINES), *served(chosen)) as stack:
        figures = asyncio.run(run(stack, chosen))
    figures = {"model": "bundled" if chosen.bundled else "simulated", **figures}
    for name, value in figures.items():
        print(f"{name:20} {value}")
    write_result(chosen.json, figures)
    if figures["lost"] or figures["different"] or figures["refused"]:
        raise SystemExit("a client noticed more than a pause")


if __name__ == "__main__":
    main()
