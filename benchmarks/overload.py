"""Three tiers under no load, full load and three times what the engine can serve: who keeps its promise?

`python -m benchmarks.overload [--seconds 30] [--loads 0.7,3]`

Starts the whole stack (Envoy, gateway, tokenizer, a simulated engine of known speed) and sends a third of the
requests under each tier, at random moments. Prints per tier how many were answered, how many of them within
the tier's targets (goodput), how many were refused, and whether every refusal was well formed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from services.bench.client import Target
from services.bench.records import RequestRecord, Targets, summarize
from services.bench.run import choose_model, run_workload
from services.bench.workload import Arrivals, Lengths, Workload
from services.supervisor.state import read_state

# The engine: every step takes this long and computes one token of each of its sequences.
STEP_MS = 20.0
MAX_NUM_SEQS = 8
COMPLETION_TOKENS = 40
PROMPT_TOKENS = 32
TARGETS = Targets(ttft_ms=1000, tpot_ms=40)
TIERS = ("interactive", "standard", "batch")
CONFIG = f"""
[engine.simulation]
step_ms = {STEP_MS}
[engine.scheduler]
max_num_seqs = {MAX_NUM_SEQS}
[gateway]
default_tier = "standard"
[gateway.admission]
max_backlog_s = 3.0
[gateway.ledger]
url = ""
[tiers.interactive]
priority = 20
ttft_target_ms = {TARGETS.ttft_ms:.0f}
tpot_target_ms = {TARGETS.tpot_ms:.0f}
queue_limit_ms = 1000
[tiers.standard]
priority = 10
queue_limit_ms = 2000
[tiers.batch]
priority = 0
[tenants.development]
allowed_tiers = ["interactive", "batch"]
"""


def capacity_per_s() -> float:
    """Requests a second that the engine can serve: a request holds its place for all of its steps."""
    return MAX_NUM_SEQS / ((COMPLETION_TOKENS + 1) * STEP_MS / 1000)


@contextmanager
def running_stack() -> Iterator[str]:
    """URL of a stack of its own."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "millrace.toml"
        config.write_text(CONFIG)
        environment = {**os.environ, "MILLRACE_STATE_DIR": folder}
        command = ["-m", "services.cli", "up", "--simulated", "--port", "0", "--config", str(config)]
        log = Path(folder) / "output"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *command], env=environment, stdout=output, stderr=output
            )
        try:
            while b"Healthy" not in log.read_bytes():
                if process.poll() is not None:
                    raise SystemExit(log.read_text())
                time.sleep(0.1)
            state = read_state(Path(folder))
            if state is None:
                raise SystemExit("the stack is healthy but has left no state")
            yield f"http://{state.address}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def workload(load: float, seconds: float, seed: int) -> Workload:
    """Requests at random moments, a third of them under each tier."""
    rate = capacity_per_s() * load
    return Workload(
        num_requests=round(rate * seconds),
        arrivals=Arrivals(rate=rate),
        input_tokens=Lengths("fixed", PROMPT_TOKENS),
        output_tokens=Lengths("fixed", COMPLETION_TOKENS),
        tiers=dict.fromkeys(TIERS, 1.0),
        seed=seed,
    )


def refusal_of(record: RequestRecord) -> str:
    """Which promise refused it; what the client read when that is not a well-formed refusal."""
    try:
        error = msgspec.json.decode(record.error)["error"]
        kind = (record.status, error["code"], error["type"])
        metadata = error["metadata"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"malformed {record.status}: {record.error[:80]}"
    if kind != (429, "QUEUE_LIMIT_EXCEEDED", "rate_limit_error"):
        return f"unexpected {kind}"
    if "shed_at_s" in metadata:
        return "shed"
    return "would wait too long" if "expected_wait_s" in metadata else "has waited too long"


def report(load: float, records: Sequence[RequestRecord], duration_s: float) -> list[dict[str, object]]:
    """Prints one line a tier."""
    print(f"\nload {load:g} x capacity ({capacity_per_s() * load:.1f} requests/s), {len(records)} requests")
    print(f"{'tier':12} {'sent':>5} {'answered':>9} {'goodput':>8} {'TTFT p50':>9} {'p99 ms':>7}  refused")
    rows: list[dict[str, object]] = []
    for tier in TIERS:
        mine = [record for record in records if record.tier == tier]
        summary = summarize(mine, duration_s, TARGETS)
        good = sum(TARGETS.met(record) for record in mine)
        refused = Counter(refusal_of(record) for record in mine if not record.ok)
        ttft = summary.ttft_ms
        middle, high = (ttft.p50, ttft.p99) if ttft else (0.0, 0.0)
        answered = len(mine) - summary.num_failed
        print(
            f"{tier:12} {len(mine):5} {answered / len(mine):9.1%} {good / len(mine):8.1%} "
            f"{middle:9.0f} {high:7.0f}  {dict(refused) or ''}"
        )
        row = {"load": load, "tier": tier, "sent": len(mine), "answered": answered, "good": good}
        rows.append({**row, "ttft_p50_ms": middle, "ttft_p99_ms": high, "refused": dict(refused)})
    return rows


def main() -> None:
    """Prints tables, and JSON with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--loads", default="0.7,1,3", help="multiples of what the engine can serve")
    parser.add_argument("--json", type=Path, help="write the result here too")
    options = parser.parse_args()
    rows = []
    with running_stack() as url:
        target = Target.parse(url, "mr-dev-local")
        model = asyncio.run(choose_model(target, ""))
        for seed, load in enumerate(float(text) for text in options.loads.split(",")):
            records, duration_s = asyncio.run(
                run_workload(
                    target, workload(load, options.seconds, seed), model, on_progress=lambda record: None
                )
            )
            rows += report(load, records, duration_s)
    if options.json:
        result = {"machine": platform.machine(), "python": platform.python_version(), "rows": rows}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
