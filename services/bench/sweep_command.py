"""`millrace bench sweep`: throughput against latency, and the highest rate that keeps a target."""

from __future__ import annotations

import asyncio
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from runtime.errors import ConfigError
from services.bench import picture, report
from services.bench.client import BenchTarget
from services.bench.options import LoadOptions
from services.bench.run import choose_model
from services.bench.sweep import RateSearch, SweepEnd, SweepPoint, SweepTarget, measure_rate
from services.bench.sweep_report import Sweep, show_sweep
from services.bench.workload import Arrivals, Workload
from services.cli.options import flattened

# A 99th percentile of fewer requests is the worst one.
_FEWEST_REQUESTS = 100


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Which target is to be kept, how far rates are tried, and where the result goes."""

    ttft_p99_ms: Annotated[
        float | None, typer.Option(min=0.001, help="Keep: 99 of 100 first tokens within this.")
    ] = None
    gap_p99_ms: Annotated[
        float | None, typer.Option(min=0.001, help="Keep: 99 of 100 gaps between pieces within this.")
    ] = None
    goodput: Annotated[
        float | None, typer.Option(min=0.01, max=1, help="Keep: this share within the --...-target-ms.")
    ] = None
    lowest: Annotated[float, typer.Option(min=0.02, help="First rate, in requests per second.")] = 1.0
    highest: Annotated[float, typer.Option(min=0.02, help="No rate above this is tried.")] = 10_000.0
    precision: Annotated[
        float, typer.Option(min=0.01, max=1, help="Kept and missed rates may differ by this share.")
    ] = 0.1
    points: Annotated[int, typer.Option(min=1, max=100, help="Rates that are measured at most.")] = 12
    seconds: Annotated[float, typer.Option(min=1, help="How long requests arrive at each rate.")] = 30.0
    requests: Annotated[
        int, typer.Option(min=1, help="Requests at each rate, where --seconds would give fewer.")
    ] = _FEWEST_REQUESTS
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None
    svg_file: Annotated[Path | None, typer.Option("--svg", help="Write the picture here.")] = None

    def wanted(self, load: LoadOptions) -> SweepTarget:
        """What is to be kept; raises ConfigError that names the option."""
        if (self.ttft_p99_ms, self.gap_p99_ms, self.goodput) == (None, None, None):
            raise ConfigError("nothing is to be kept; give --ttft-p99-ms, --gap-p99-ms or --goodput")
        if self.goodput is not None and not load.targets.given:
            raise ConfigError(
                "--goodput: it is the share within the targets of each request; give --ttft-target-ms, "
                "--tpot-target-ms or --e2e-target-ms, too"
            )
        numbers = (
            self.ttft_p99_ms,
            self.gap_p99_ms,
            self.lowest,
            self.highest,
            self.seconds,
            load.burstiness,
        )
        if not all(math.isfinite(number) for number in numbers if number is not None):
            raise ConfigError(
                "--ttft-p99-ms, --gap-p99-ms, --lowest, --highest, --seconds, --burstiness: expected finite "
                "numbers"
            )
        if self.lowest > self.highest:
            raise ConfigError(
                f"--lowest {self.lowest:g} is above --highest {self.highest:g}; give them in their order"
            )
        if self.requests < _FEWEST_REQUESTS and (self.ttft_p99_ms or self.gap_p99_ms):
            raise ConfigError(
                f"--requests {self.requests}: a 99th percentile needs {_FEWEST_REQUESTS} or more; raise it, "
                "or keep --goodput alone"
            )
        return SweepTarget(ttft_p99_ms=self.ttft_p99_ms, gap_p99_ms=self.gap_p99_ms, goodput=self.goodput)

    def workload(self, load: LoadOptions, rate: float, number: int) -> Workload:
        """What is sent at a rate. No two of them have a prompt in common, which a cache would know."""
        count = max(self.requests, math.ceil(rate * self.seconds))
        workload = load.workload(count, Arrivals(rate=rate, burstiness=load.burstiness))
        return msgspec.structs.replace(workload, seed=load.seed + number)


@flattened
def sweep(load: LoadOptions, options: SweepOptions) -> None:
    """Find the highest rate of requests that keeps a target, and the curve to it."""
    console = Console()
    try:
        wanted = options.wanted(load)
        options.workload(load, options.lowest, 0)
        for option, path in (("--json", options.json_file), ("--svg", options.svg_file)):
            if path is not None:
                report.check_writable(path, option)
        target, url = load.target()
        result = asyncio.run(_measure(console, target, url, wanted, load, options))
        show_sweep(result, console)
        if options.json_file is not None:
            report.write(result, options.json_file)
        if options.svg_file is not None:
            report.write_text(picture.to_svg(result), options.svg_file, "--svg")
    except ConfigError as error:
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(2) from error
    if result.kept_rate is None:
        raise typer.Exit(1)


async def _measure(
    console: Console,
    target: BenchTarget,
    url: str,
    wanted: SweepTarget,
    load: LoadOptions,
    options: SweepOptions,
) -> Sweep:
    model = await choose_model(target, load.model)
    search = RateSearch(
        low=options.lowest,
        high=options.highest,
        precision=options.precision,
        max_points=options.points,
    )
    points: list[SweepPoint] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        ended: SweepEnd
        while True:
            following = search.next_rate()
            if isinstance(following, str):
                ended = following
                break
            workload = options.workload(load, following, len(points))
            task = progress.add_task(f"{following:.4g} requests/s", total=workload.num_requests)
            point = await measure_rate(
                target,
                workload,
                model,
                wanted=wanted,
                targets=load.targets,
                num_warmup=load.warmup if not points else 0,
                limit_s=load.request_limit,
                on_progress=functools.partial(progress.advance, task),
            )
            progress.remove_task(task)
            points.append(point)
            search.tell(following, is_kept=point.is_kept)
            console.print(_line(point), highlight=False)
    return Sweep.of(
        label=load.label,
        url=url,
        model=model,
        workload=options.workload(load, options.lowest, 0),
        wanted=wanted,
        targets=load.targets,
        points=points,
        ended=ended,
    )


def _line(point: SweepPoint) -> str:
    verdict = "kept" if point.is_kept else f"missed: {', '.join(point.missed)}"
    given_up = point.num_planned - point.summary.num_requests
    return f"{point.rate:.4g} requests/s: {verdict}" + (
        f" (given up, {given_up} not awaited)" if given_up else ""
    )
