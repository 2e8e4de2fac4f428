"""`millrace bench`: the command line of the load generator."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from runtime.errors import ConfigError
from services.bench import report
from services.bench.client import BenchTarget
from services.bench.options import LoadOptions
from services.bench.records import RequestRecord
from services.bench.run import choose_model, run_workload
from services.bench.sweep_command import sweep
from services.bench.workload import Arrivals, Workload
from services.cli.options import flattened

app = typer.Typer(help="Measure an OpenAI-compatible server under load, or compare two measurements.")
app.command("sweep")(sweep)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How many requests are sent, when, and where the result goes."""

    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 64
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: requests at a time; 8 when not given.")
    ] = None
    rate: Annotated[float, typer.Option(min=0, help="Open loop: requests per second; 0 is closed.")] = 0.0
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None


@app.command("run")
@flattened
def run(load: LoadOptions, options: RunOptions) -> None:
    """Send a workload and print TTFT, TPOT, ITL, E2E, throughput and goodput."""
    console = Console()
    try:
        workload = load.workload(
            options.requests, _arrivals(options.concurrency, options.rate, load.burstiness)
        )
        if options.json_file is not None:
            report.check_writable(options.json_file)
        target, url = load.target()
        result = asyncio.run(_measure(console, target, url, workload, load))
        report.show(result, console)
        if options.json_file is not None:
            report.write(result, options.json_file)
    except ConfigError as error:
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(2) from error
    if result.total.num_requests < options.requests:
        console.print(
            f"[yellow]interrupted after {result.total.num_requests} of {options.requests} requests[/]"
        )
        raise typer.Exit(130)
    if result.total.num_failed:
        raise typer.Exit(1)


@app.command("compare")
def compare(before: Path, after: Path) -> None:
    """Print two results side by side with ratios."""
    console = Console()
    try:
        report.show_comparison(report.read(before), report.read(after), console)
    except ConfigError as error:
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(2) from error


async def _measure(
    console: Console, target: BenchTarget, url: str, workload: Workload, load: LoadOptions
) -> report.Result:
    model = await choose_model(target, load.model)
    label = escape(load.label)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=workload.num_requests)
        ended: list[RequestRecord] = []

        def advance(record: RequestRecord) -> None:
            ended.append(record)
            progress.advance(task)
            if not record.ok:
                progress.update(task, description=f"{label} [red](failures)[/]")

        try:
            records, duration_s = await run_workload(
                target,
                workload,
                model,
                num_warmup=load.warmup,
                limit_s=load.request_limit,
                on_progress=advance,
            )
        except asyncio.CancelledError:
            # Ctrl-C: what was measured until then is shown, and written.
            if not ended:
                raise
            records = ended
            duration_s = time.perf_counter() - min(record.start_s for record in ended)
    return report.make_result(
        label=load.label,
        url=url,
        model=model,
        workload=workload,
        targets=load.targets,
        records=records,
        duration_s=duration_s,
    )


def _arrivals(concurrency: int | None, rate: float, burstiness: float) -> Arrivals:
    if not (math.isfinite(rate) and math.isfinite(burstiness)):
        raise ConfigError("--rate and --burstiness: expected finite numbers")
    if rate and concurrency is not None:
        raise ConfigError(
            "--concurrency: with --rate requests start by the clock, however many are under way; give one"
        )
    if not rate and burstiness != 1.0:
        raise ConfigError("--burstiness: it says how requests of an open loop arrive; give --rate, too")
    return Arrivals(concurrency=concurrency or 8, rate=rate, burstiness=burstiness)
