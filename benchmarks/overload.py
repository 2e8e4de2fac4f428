"""Three tiers at three times what the engine can serve: who keeps its promise, and who is told to come back?

`python -m benchmarks.overload [--seconds 12] [--loads 3]`

Starts the whole stack (Envoy, gateway, tokenizer, a simulated engine of known speed) twice: with one queue
for everybody, which is the baseline, and with tiers. A third of the requests comes under each tier, at random
moments that are the same in both. Prints per tier how many were answered, how many of them met the tier's
targets for the time to the first token and per output token (goodput), how many were refused, and whether
every refusal was well formed: status, code, numbers and Retry-After. What was accepted must not be dropped.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.stack import RunningStack, running_stack, write_result
from services.bench.client import Target
from services.bench.records import RequestRecord, Targets, summarize
from services.bench.run import choose_model, run_workload
from services.bench.workload import Arrivals, Lengths, Workload

# The engine: every step takes this long and computes one token of each of its sequences.
STEP_MS = 20.0
MAX_NUM_SEQS = 8
COMPLETION_TOKENS = 40
PROMPT_TOKENS = 32
TARGETS = {
    "interactive": Targets(ttft_ms=1000, tpot_ms=40),
    "standard": Targets(ttft_ms=2500, tpot_ms=60),
    "batch": Targets(ttft_ms=10_000, tpot_ms=200),
}
ENGINE = f"""
[engine.simulation]
step_ms = {STEP_MS}
[engine.scheduler]
max_num_seqs = {MAX_NUM_SEQS}
[tenants.development]
allowed_tiers = ["interactive", "batch"]
[gateway]
default_tier = "standard"
[gateway.ledger]
url = ""
"""
CONFIGS = {
    "one queue": ENGINE
    + """
[gateway.admission]
max_backlog_s = 100000.0
[tiers.interactive]
[tiers.standard]
[tiers.batch]
""",
    "tiers": ENGINE
    + """
[gateway.admission]
max_backlog_s = 3.0
[tiers.interactive]
priority = 20
ttft_target_ms = 1000
tpot_target_ms = 40
queue_limit_ms = 1000
[tiers.standard]
priority = 10
ttft_target_ms = 2500
tpot_target_ms = 60
queue_limit_ms = 2500
[tiers.batch]
priority = 0
ttft_target_ms = 10000
tpot_target_ms = 200
queue_limit_ms = 10000
""",
}
# Seconds between two requests that are sent only to look at the headers of a refusal.
PROBE_EVERY_S = 0.5


def capacity_per_s() -> float:
    """Requests a second that the engine can serve: a request holds its place for all of its steps."""
    return MAX_NUM_SEQS / ((COMPLETION_TOKENS + 1) * STEP_MS / 1000)


def workload(load: float, seconds: float, seed: int) -> Workload:
    """Requests at random moments, a third of them under each tier."""
    rate = capacity_per_s() * load
    return Workload(
        num_requests=round(rate * seconds),
        arrivals=Arrivals(rate=rate),
        input_tokens=Lengths("fixed", PROMPT_TOKENS),
        output_tokens=Lengths("fixed", COMPLETION_TOKENS),
        tiers=dict.fromkeys(TARGETS, 1.0),
        seed=seed,
    )


def refusal_of(record: RequestRecord) -> str:
    """Which promise refused it; what the client read when that is not a well-formed refusal."""
    try:
        error = msgspec.json.decode(record.error)["error"]
        kind = (record.status, error["reason"], error["type"])
        metadata = error["metadata"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"malformed {record.status}: {record.error[:80]}"
    if kind != (429, "QUEUE_LIMIT_EXCEEDED", "rate_limit_error"):
        return f"unexpected {kind}"
    if "shed_at_s" in metadata:
        return "shed"
    return "would wait too long" if "expected_wait_s" in metadata else "has waited too long"


async def probe(stack: RunningStack, model: str, refusals: Counter[str]) -> None:
    """Asks under the lowest tier until cancelled; counts refusals by whether their headers are complete."""
    headers = {"authorization": f"Bearer {stack.state.api_key}"}
    message = {"role": "user", "content": "Hi"}
    body = {"model": model, "messages": [message], "max_tokens": 1, "service_tier": "batch"}
    async with httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=300, trust_env=False) as client:
        while True:
            answer = await client.post("/v1/chat/completions", json=body)
            if answer.status_code != 200:
                after = answer.headers.get("retry-after", "")
                whole = after.isdigit() and int(after) > 0 and answer.headers.get("x-request-id")
                refusals["complete" if whole else f"incomplete {dict(answer.headers)}"] += 1
            await asyncio.sleep(PROBE_EVERY_S)


async def load_stack(
    stack: RunningStack, load: float, seconds: float
) -> tuple[list[RequestRecord], float, Counter[str]]:
    """Records of all requests, how long it took, and the probe's refusals."""
    target = Target.parse(stack.url, stack.state.api_key)
    model = await choose_model(target, "")
    refusals: Counter[str] = Counter()
    probing = asyncio.create_task(probe(stack, model, refusals))
    records, duration_s = await run_workload(
        target, workload(load, seconds, seed=0), model, on_progress=lambda record: None
    )
    probing.cancel()
    return records, duration_s, refusals


def report(
    name: str, load: float, records: Sequence[RequestRecord], duration_s: float
) -> list[dict[str, Any]]:
    """Prints one line a tier."""
    print(
        f"\n{name}: {load:g} x capacity ({capacity_per_s() * load:.1f} requests/s), {len(records)} requests"
    )
    print(
        f"{'tier':12} {'sent':>5} {'answered':>9} {'goodput':>8} {'TTFT p50':>9} {'p99 ms':>7} "
        f"{'TPOT p99':>9} {'dropped':>8}  refused"
    )
    rows: list[dict[str, Any]] = []
    for tier, targets in TARGETS.items():
        mine = [record for record in records if record.tier == tier]
        summary = summarize(mine, duration_s, targets)
        good = sum(targets.met(record) for record in mine)
        refused = Counter(refusal_of(record) for record in mine if not record.ok and record.status != 200)
        dropped = sum(not record.ok and record.status == 200 for record in mine)
        ttft, tpot = summary.ttft_ms, summary.tpot_ms
        middle, high = (ttft.p50, ttft.p99) if ttft else (0.0, 0.0)
        pace = tpot.p99 if tpot else 0.0
        answered = len(mine) - summary.num_failed
        print(
            f"{tier:12} {len(mine):5} {answered / len(mine):9.1%} {good / len(mine):8.1%} "
            f"{middle:9.0f} {high:7.0f} {pace:9.0f} {dropped:8}  {dict(refused) or ''}"
        )
        row = {"configuration": name, "load": load, "tier": tier, "sent": len(mine), "answered": answered}
        row |= {"good": good, "ttft_p50_ms": middle, "ttft_p99_ms": high, "tpot_p99_ms": pace}
        rows.append({**row, "accepted_then_dropped": dropped, "refused": dict(refused)})
    return rows


def main() -> None:
    """Prints tables, and JSON with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=12.0, help="during which requests come")
    parser.add_argument("--loads", default="3", help="multiples of what the engine can serve, 0.7,1,3")
    parser.add_argument("--json", type=Path, help="write the result here too")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    probed: Counter[str] = Counter()
    for name, config in CONFIGS.items():
        with running_stack(config, "--simulated") as stack:
            for load in (float(text) for text in options.loads.split(",")):
                records, duration_s, refusals = asyncio.run(load_stack(stack, load, options.seconds))
                rows += report(name, load, records, duration_s)
                probed += refusals
    print(f"\nheaders of refusals that were looked at: {dict(probed)}")
    write_result(options.json, {"rows": rows, "probed_refusals": dict(probed)})
    malformed = [key for row in rows for key in row["refused"] if "malformed" in key or "unexpected" in key]
    if malformed or any(row["accepted_then_dropped"] for row in rows):
        raise SystemExit(f"a promise was broken: {malformed or 'an accepted request was dropped'}")


if __name__ == "__main__":
    main()
