"""Engines die by SIGKILL, one after another, under running streams: does a client notice more than a pause?

`python -m benchmarks.chaos [--seconds 120] [--bundled]`
`python -m benchmarks.chaos --stop [--seconds 30] [--stop-seconds 75] [--victims 1] [--each 2] [--kinds core]`

Starts a whole stack with three engines (simulated, or the bundled model with --bundled). Every client asks
the same greedy question again and again; what the answer is was found out before, undisturbed, and once more
as a control. Then one engine is killed every ten seconds, in turn, and the supervisor starts it again. Every
answer whose stream began must arrive whole and equal, byte for byte. The longest pause is the longest time
that a client waited for the next chunk of a stream that had begun.

With --stop processes are stopped (SIGSTOP) instead, in a stack with two engines and two gateways (--each):
one kind after another, each once. The ledger's tokens, and what engines computed, are compared with what
clients got. A gateway's streams end with it, and Envoy's: with --clients-continue their clients ask for the
rest of what they have, as docs/operations.md says.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time

from benchmarks.answers import Clients, Observed
from benchmarks.chaos_stop import CONFIG, KINDS, served, stop_all_kinds
from benchmarks.engine.report import options
from benchmarks.stack import RunningStack, running_stack, write_result

NUM_ENGINES = 3
KILL_EVERY_S = 10.0


async def kill_engines(stack: RunningStack, end_s: float) -> int:
    """Kills one engine every KILL_EVERY_S, in turn; returns how many. One that is not back yet is spared."""
    killed: dict[str, int] = {}
    num_kills = 0
    while time.monotonic() + KILL_EVERY_S < end_s:
        await asyncio.sleep(KILL_EVERY_S)
        name = f"engine-{num_kills % NUM_ENGINES}"
        pid = stack.pids()[name]
        if killed.get(name) == pid:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed[name] = pid
            num_kills += 1
    return num_kills


async def run(stack: RunningStack, num_streams: int, num_tokens: int, seconds: float) -> dict[str, object]:
    """Reference, control, chaos; the figures of all three."""
    clients = Clients(stack, num_streams, num_tokens)
    expected = await clients.ask_all()
    whole = sum(not each.error and each.completion_tokens == num_tokens for each in expected)
    control = await clients.ask_all()
    observed = Observed()
    end_s = time.monotonic() + seconds
    killing = asyncio.create_task(kill_engines(stack, end_s))
    await clients.ask_until(end_s, expected, observed)
    num_kills = await killing
    await clients.close()
    gaps_s = sorted(observed.gaps_s)
    return {
        "engines": NUM_ENGINES,
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
    with running_stack(CONFIG, "--engines", str(NUM_ENGINES), *served(chosen)) as stack:
        figures = asyncio.run(run(stack, chosen.streams, chosen.tokens, chosen.seconds))
    figures = {"model": "bundled" if chosen.bundled else "simulated", **figures}
    for name, value in figures.items():
        print(f"{name:20} {value}")
    write_result(chosen.json, figures)
    if figures["lost"] or figures["different"] or figures["refused"]:
        raise SystemExit("a client noticed more than a pause")


if __name__ == "__main__":
    main()
