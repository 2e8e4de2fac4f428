"""Three times what a model can do, with and without a cheaper model that answers before a refusal.

`python -m benchmarks.fallback [--rounds 3] [--seconds 30] [--load 3] [--simulated] [--json FILE]`

Starts a whole stack with two real models, the bundled one and its draft model, and measures what the first
can do when it always has something to do. Then requests for it arrive at a multiple of that rate, at random
moments, in turns: under a tier without a fallback, and under one that is the same but for its fallback. Both
turns of a round send the same requests at the same moments.

Prints for each turn who answered (the answer's own `model` says so), how many were refused or failed, and of
each model the time to the first token and the share of its answers that met the tier's targets for it and for
the time per token. Nobody comes back after a refusal: what was refused is what the fallback is there for.

Real engines share the machine's cores with each other, the gateway and the clients: what the cheaper model
computes is taken from the other one, and the first token comes later than the engine expected from its own
pace. With --simulated every engine has a device of its own, whose steps take 40 ms, and the cheaper model has
three, so that it can take what the first refuses.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engine.report import Row, publish
from benchmarks.stack import RunningStack, running_stack
from services.bench.client import BenchTarget
from services.bench.records import Percentiles, RequestRecord, Targets
from services.bench.run import run_workload
from services.bench.workload import Arrivals, Lengths, Workload
from services.supervisor.config import ROOT

LARGE, SMALL = "millrace-nano", "millrace-nano-draft"
# Of both tiers.
TARGETS = Targets(ttft_ms=2000, tpot_ms=200)
# A turn's name, and what its tier says of a fallback.
TURNS = {"none": "", "fallback": f'fallback = {{{LARGE} = "{SMALL}"}}'}
MAX_NUM_SEQS = 16
# Requests that are sent, so many at a time as the engine computes, to see what it can do.
CAPACITY_REQUESTS = 128
PROMPT_WORDS = Lengths.parse("uniform:32:128")
COMPLETION_TOKENS = Lengths.parse("uniform:64:192")

SIMULATION = "[engine.simulation]\nstep_ms = 40.0\n"


def config(*, simulated: bool) -> str:
    """Both models, and a tier for each turn."""
    tiers = "".join(
        f"[tiers.{name}]\nttft_target_ms = {TARGETS.ttft_ms:.0f}\n"
        f"tpot_target_ms = {TARGETS.tpot_ms:.0f}\n{fallback}\n"
        for name, fallback in TURNS.items()
    )
    return f"""
[models.{LARGE}]
path = "{ROOT / "models" / LARGE}"
[models.{SMALL}]
path = "{ROOT / "models" / SMALL}"
engines = {3 if simulated else 1}
[engine.scheduler]
max_num_seqs = {MAX_NUM_SEQS}
{SIMULATION if simulated else ""}
[gateway]
default_tier = "none"
[gateway.ledger]
url = ""
{tiers}
"""


def workload(num_requests: int, arrivals: Arrivals, turn: str, seed: int) -> Workload:
    """What is sent in one turn; with equal seeds only the tier differs."""
    return Workload(
        num_requests=num_requests,
        arrivals=arrivals,
        input_tokens=PROMPT_WORDS,
        output_tokens=COMPLETION_TOKENS,
        tiers={turn: 1.0},
        # Words: who asks for a model by name need not know the vocabulary of the one that answers.
        prompt_kind="text",
        seed=seed,
    )


async def send(stack: RunningStack, what: Workload) -> tuple[list[RequestRecord], float]:
    """What became of each request, and seconds until the last had ended."""
    target = BenchTarget.parse(stack.url, stack.state.api_key)
    return await run_workload(target, what, LARGE, on_progress=lambda record: None)


async def capacity(stack: RunningStack) -> float:
    """Requests a second that the model answers when it always has some to do."""
    arrivals = Arrivals(concurrency=MAX_NUM_SEQS)
    # Before it has seen any, an engine knows its own pace from a trial alone.
    await send(stack, workload(MAX_NUM_SEQS, arrivals, "none", 1))
    records, seconds = await send(stack, workload(CAPACITY_REQUESTS, arrivals, "none", 2))
    failed = [record for record in records if not record.ok]
    if failed:
        raise SystemExit(f"{len(failed)} of the requests failed, the first one: {failed[0].error[:200]}")
    return len(records) / seconds


def row_of(number: str, turn: str, records: Sequence[RequestRecord]) -> Row:
    """A line of the table."""
    refused = sum(record.status == 429 for record in records)
    row: dict[str, str | float | int] = {"round": number, "tier's fallback": turn, "asked": len(records)}
    answers = {name: [each for each in records if each.ok and each.model == name] for name in (LARGE, SMALL)}
    row |= {
        "by the model": len(answers[LARGE]),
        "by the cheaper": len(answers[SMALL]),
        "refused": refused,
        "errors": len(records) - refused - sum(map(len, answers.values())),
    }
    for name, title in ((LARGE, "model"), (SMALL, "cheaper")):
        times = Percentiles.of([record.ttft_s for record in answers[name]])
        met = sum(map(TARGETS.met, answers[name]))
        row |= {
            f"{title}: TTFT p50 ms": round(times.p50) if times else "",
            f"{title}: TTFT p99 ms": round(times.p99) if times else "",
            f"{title}: in target %": 100 * met / len(answers[name]) if answers[name] else "",
        }
    return row


def measure(stack: RunningStack, rate_per_s: float, seconds: float, rounds: int) -> list[Row]:
    """A row of every turn, and one of all turns of a kind."""
    rows: list[Row] = []
    found: dict[str, list[RequestRecord]] = {turn: [] for turn in TURNS}
    for number in range(rounds):
        for turn in TURNS if number % 2 == 0 else reversed(TURNS):
            what = workload(round(rate_per_s * seconds), Arrivals(rate=rate_per_s), turn, 10 + number)
            records, _ = asyncio.run(send(stack, what))
            found[turn] += records
            rows.append(row_of(str(number + 1), turn, records))
    return [*rows, *(row_of("all", turn, records) for turn, records in found.items())]


def main() -> None:
    """Prints the table, and JSON with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="of two turns each")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a turn, during which requests come")
    parser.add_argument("--load", type=float, default=3.0, help="multiple of what the model can do")
    parser.add_argument("--simulated", action="store_true", help="engines with a device of their own")
    parser.add_argument("--json", type=Path, help="write the result here too")
    options = parser.parse_args()
    arguments = ("--simulated",) if options.simulated else ()
    with running_stack(config(simulated=options.simulated), *arguments) as stack:
        able_per_s = asyncio.run(capacity(stack))
        rows = measure(stack, options.load * able_per_s, options.seconds, options.rounds)
        fallbacks = stack.counter("gateway", "millrace_fallbacks_total")
    kind = "Simulated engines" if options.simulated else "Real engines on the same cores"
    notes = (
        f"{kind}. {LARGE} alone answers {able_per_s:.2f} requests/s; {options.load:g} times that "
        f"were sent for {options.seconds:g} s a turn. Targets: {TARGETS.ttft_ms:.0f} ms to the first token, "
        f"{TARGETS.tpot_ms:.0f} ms per token. Gateways counted {fallbacks:.0f} fallbacks."
    )
    title = f"{options.load:g} times the load of {LARGE}, with {SMALL} to fall back to"
    publish(title, rows, options.json, notes)


if __name__ == "__main__":
    main()
