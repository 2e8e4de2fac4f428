"""The simulator beside the real stack: five loads that it was not fitted to, by first tokens and throughput.

    python -m benchmarks.fleet [--config CONFIG] [--requests 60] [--load 0.5] [--seeds 5] [--json OUT]

The configuration's model is measured as `millrace simulate --measure` does, and a stack of it is started.
What lies before and behind an engine (Envoy, gateway, tokenizer, messages) is taken from requests that come
one after another, and added to the simulated times to the first token. Then each load is sent to the stack,
and the same arrivals are simulated. `--load` is the part of an engine that a load fills. A machine that does
something else meanwhile makes the comparison worthless.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
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


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Both side by side."""
    table = Table("load", "figure", "stack", "simulated", "ratio", "within", box=None)
    for row in rows:
        for name, interval in row["simulated"].items():
            real = row["stack"][name]
            table.add_row(
                row["load"],
                name,
                f"{real:.4g}",
                f"{interval.mean:.4g} ({interval.low:.4g} … {interval.high:.4g})",
                f"{interval.mean / real:.3f}",
                "yes" if interval.low <= real <= interval.high else "no",
            )
    console.print(table)


def main() -> None:
    """Runs, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--load", type=float, default=0.5)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        record = Path(name) / "steps.json"
        if step_record.main(["--config", str(options.config), "--json", str(record)]):
            raise SystemExit(2)
        setup = read_record(record)
    settings = load_settings(read_tables(options.config))
    scenario = Scenario(load=(), setup=setup, config=settings.gateway, tiers=Tiers(settings), objectives={})
    rows: list[dict[str, Any]] = []
    with running_stack(options.config.read_text(encoding="utf-8")) as stack:
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
            rows.append({"load": name, "stack": real, "simulated": simulated_figures(runs, front_s)})
    show(rows, Console())
    write_result(options.json, msgspec.to_builtins({"front_s": front_s, "load": options.load, "rows": rows}))


if __name__ == "__main__":
    main()
