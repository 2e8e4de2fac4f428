"""The simulator beside the real stack: five loads that it was not fitted to, by first tokens and throughput.

    python -m benchmarks.fleet [--model smollm2-135m] [--requests 60] [--load 0.5] [--seeds 5] [--json OUT]

The configuration's model, or the one that is named, is measured as `millrace simulate --measure` does, and a
stack of it is started. What lies before and behind an engine (Envoy, gateway, tokenizer, messages) is taken
from requests that come one after another, and added to the simulated times to the first token. Then each load
is sent to the stack, and the same arrivals are simulated. `--load` is the part of an engine
that a load fills. A machine that does something else meanwhile makes the comparison worthless.
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
from services.bench.workload import Arrivals, Lengths, Workload, plan
from services.simulate.arrivals import ArrivingRequest
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
# Answers of one step, by which an engine's capacity is counted.
_TOGETHER = 8


def workload(name: str, setup: EngineSetup, load: float, num_requests: int) -> Workload:
    """A load that fills this part of one engine."""
    prompt, answer, burstiness = LOADS[name]
    lengths = Lengths.parse(prompt), Lengths.parse(answer)
    tokens = [each.low for each in lengths]
    model = setup.model
    token_s = model.answers_s(_TOGETHER, int(_TOGETHER * tokens[0])) / _TOGETHER
    work_s = model.chunk_s + tokens[0] * model.prompt_token_s + tokens[1] * token_s
    return Workload(
        num_requests=num_requests,
        arrivals=Arrivals(rate=load / work_s, burstiness=burstiness),
        input_tokens=lengths[0],
        output_tokens=lengths[1],
        seed=1,
    )


def arrivals_of(what: Workload, model: str) -> tuple[ArrivingRequest, ...]:
    """The same requests for the simulator."""
    return tuple(
        ArrivingRequest(
            each.start_s, each.prompt_tokens, int(msgspec.json.decode(each.body)["max_tokens"]), "development"
        )
        for each in plan(what, model)
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


def simulated_figures(runs: list[RunFigures], front_s: float) -> dict[str, PredictionInterval]:
    """The same, with where nine of ten runs lie; what lies before and behind the engine is added."""
    return {
        "ttft_p50_ms": over_seeds(runs, lambda run: 1000 * (run.total.ttft_p50_s + front_s)),
        "ttft_p99_ms": over_seeds(runs, lambda run: 1000 * (run.total.ttft_p99_s + front_s)),
        "output_tokens_per_s": over_seeds(runs, lambda run: run.total.output_tokens_per_s),
    }


def compared(
    load: str, real: dict[str, float], simulated: dict[str, PredictionInterval]
) -> Iterator[dict[str, Any]]:
    """A row for each figure: the stack's, the simulator's, and where one more run of that would lie."""
    for name, interval in simulated.items():
        yield {
            "load": load,
            "figure": name,
            "stack": real[name],
            "simulated": interval.mean,
            "low": interval.low,
            "high": interval.high,
            "ratio": interval.mean / real[name],
            "within": interval.low <= real[name] <= interval.high,
        }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Both side by side."""
    table = Table("load", "figure", "stack", "simulated", "ratio", "within", box=None)
    for row in rows:
        table.add_row(
            row["load"],
            row["figure"],
            f"{row['stack']:.4g}",
            f"{row['simulated']:.4g} ({row['low']:.4g} … {row['high']:.4g})",
            f"{row['ratio']:.3f}",
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
    scenario = Scenario(load=(), setup=setup, config=settings.gateway, tiers=Tiers(settings), objectives={})
    rows: list[dict[str, Any]] = []
    with running_stack(text) as stack:
        alone = Workload(
            num_requests=12,
            arrivals=Arrivals(),
            input_tokens=Lengths.parse("96"),
            output_tokens=Lengths.parse("8"),
        )
        records, _ = asyncio.run(measured(stack, alone))
        one = msgspec.structs.replace(scenario, load=(ArrivingRequest(0.0, 96, 8, "development"),)).run(1, 0)
        front_s = max(0.0, at_share(sorted(each.ttft_s for each in records), 0.5) - one.total.ttft_p50_s)
        for name in LOADS:
            what = workload(name, setup, options.load, options.requests)
            real = real_figures(*asyncio.run(measured(stack, what)))
            same = msgspec.structs.replace(scenario, load=arrivals_of(what, "model"))
            runs = [same.run(1, seed) for seed in range(options.seeds)]
            rows += compared(name, real, simulated_figures(runs, front_s))
    show(rows, Console())
    title = f"The simulator beside the real stack, {setup.name}, which the loads fill to {options.load:g}"
    write_result(options.json, {"title": title, "front_s": front_s, "rows": rows})


if __name__ == "__main__":
    main()
