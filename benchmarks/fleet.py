"""The simulator beside the real stack: five loads that it was not fitted to, by first tokens and throughput.

    python -m benchmarks.fleet [--model smollm2-135m] [--requests 60] [--load 0.5] [--seeds 5] [--json OUT]

The configuration's model, or the one that is named, is measured as `millrace simulate --measure` does, a
stack of it is started, and asked what it adds to the engine's steps as `--calibrate` does, by a load of its
own. Then each load is sent to the stack, and the same arrivals are simulated, with and without what was
added. `--load` is the part of an engine that a load fills. A machine that does something else meanwhile makes
the comparison worthless.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.stack import RunningStack, running_stack, write_result
from engine.core import step_record
from gateway.settings import load_settings
from gateway.tiers import Tiers
from runtime.config import read_tables
from services.bench.client import BenchTarget
from services.bench.records import RequestRecord
from services.bench.run import choose_model, run_workload
from services.bench.workload import Lengths, Workload
from services.simulate.calibration import arrivals_of, calibrated, filling
from services.simulate.outcome import PredictionInterval, RunFigures, at_share, over_seeds
from services.simulate.scenario import Scenario
from services.simulate.step_model import EngineSetup, read_record

CONFIG = Path("config/millrace.toml")
# Name: prompt, answer, burstiness of the arrivals.
LOADS = {
    "short": ("64", "32", 1.0),
    "long prompts": ("512", "16", 1.0),
    "long answers": ("32", "128", 1.0),
    "bursts": ("64", "32", 0.2),
    "mixed": ("lognormal:128:0.8", "lognormal:48:0.6", 1.0),
}


def workload(name: str, setup: EngineSetup, load: float, num_requests: int) -> Workload:
    """A load that fills this part of one engine. No two loads share a prompt."""
    prompt, answer, burstiness = LOADS[name]
    lengths = Lengths.parse(prompt), Lengths.parse(answer)
    return Workload(
        num_requests=num_requests,
        arrivals=filling(setup, *lengths, load, burstiness=burstiness),
        input_tokens=lengths[0],
        output_tokens=lengths[1],
        seed=1 + list(LOADS).index(name),
    )


async def measured(stack: RunningStack, what: Workload) -> tuple[list[RequestRecord], float]:
    """The stack's answers, and how long all took."""
    target = BenchTarget.parse(stack.url, stack.state.api_key)
    model = await choose_model(target, "")
    return await run_workload(target, what, model, num_warmup=1, on_progress=lambda record: None)


def real_figures(records: list[RequestRecord], seconds: float) -> dict[str, float]:
    """TTFT in ms, output tokens per second, and failures."""
    firsts = sorted(each.ttft_s for each in records if each.ok)
    return {
        "ttft_p50_ms": 1000 * at_share(firsts, 0.5),
        "ttft_p99_ms": 1000 * at_share(firsts, 0.99),
        "output_tokens_per_s": sum(each.completion_tokens for each in records) / seconds,
        "failed": float(sum(not each.ok for each in records)),
    }


def simulated_figures(runs: list[RunFigures]) -> dict[str, PredictionInterval]:
    """The same, with where nine of ten runs lie."""
    return {
        "ttft_p50_ms": over_seeds(runs, lambda run: 1000 * run.total.ttft_p50_s),
        "ttft_p99_ms": over_seeds(runs, lambda run: 1000 * run.total.ttft_p99_s),
        "output_tokens_per_s": over_seeds(runs, lambda run: run.total.output_tokens_per_s),
    }


def compared(
    load: str,
    real: dict[str, float],
    simulated: dict[str, PredictionInterval],
    steps_alone: dict[str, PredictionInterval],
) -> Iterator[dict[str, Any]]:
    """A row for each figure: the stack's, the simulator's, where one more run of that would lie, and what it
    says by the engine's steps alone.
    """
    for name, interval in simulated.items():
        yield {
            "load": load,
            "figure": name,
            "stack": real[name],
            "simulated": interval.mean,
            "low": interval.low,
            "high": interval.high,
            "ratio": interval.mean / real[name],
            "baseline: steps alone, ratio": steps_alone[name].mean / real[name],
            "within": interval.low <= real[name] <= interval.high,
        }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Both side by side."""
    table = Table("load", "figure", "stack", "simulated", "ratio", "steps alone", "within", box=None)
    for row in rows:
        table.add_row(
            row["load"],
            row["figure"],
            f"{row['stack']:.4g}",
            f"{row['simulated']:.4g} ({row['low']:.4g} … {row['high']:.4g})",
            f"{row['ratio']:.3f}",
            f"{row['baseline: steps alone, ratio']:.3f}",
            "yes" if row["within"] else "no",
        )
    console.print(table)


def configured(config: Path, model: str) -> str:
    """The configuration's text, with another model where one is named."""
    text = config.read_text(encoding="utf-8")
    return text if not model else re.sub(r'(?m)^path = ".*"$', f"path = {json.dumps(model)}", text, count=1)


def main() -> None:
    """Runs, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--model", default="", help="instead of the configuration's: a folder or a name")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--load", type=float, default=0.5)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        config, record = Path(name) / "millrace.toml", Path(name) / "steps.json"
        config.write_text(configured(options.config, options.model), encoding="utf-8")
        if step_record.main(["--config", str(config), "--json", str(record)]):
            raise SystemExit(2)
        setup, settings, text = read_record(record), load_settings(read_tables(config)), config.read_text()
    tiers, rows = Tiers(settings), list[dict[str, Any]]()
    alone = Scenario(load=(), setup=setup, config=settings.gateway, tiers=tiers, objectives={})
    with running_stack(text) as stack:
        target = BenchTarget.parse(stack.url, stack.state.api_key)
        costs = asyncio.run(calibrated(target, setup, settings.gateway, tiers))
        there = msgspec.structs.replace(alone, setup=msgspec.structs.replace(setup, stack_costs=costs))
        for name in LOADS:
            what = workload(name, setup, options.load, options.requests)
            records, seconds = asyncio.run(measured(stack, what))
            load = arrivals_of(records)
            with_costs, without = (
                [msgspec.structs.replace(each, load=load).run(1, seed) for seed in range(options.seeds)]
                for each in (there, alone)
            )
            real, simulated = real_figures(records, seconds), simulated_figures(with_costs)
            rows += compared(name, real, simulated, simulated_figures(without))
    show(rows, Console())
    slowdown, front_s = costs.for_seed(0)
    title = f"The simulator beside the real stack, {setup.name}, which the loads fill to {options.load:g}"
    write_result(options.json, {"title": title, "slowdown": slowdown, "front_s": front_s, "rows": rows})


if __name__ == "__main__":
    main()
