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
from services.bench.client import REQUEST_LIMIT_S, BenchTarget
from services.bench.records import RequestRecord, Targets
from services.bench.run import choose_model, run_workload
from services.bench.workload import MAX_LENGTH, Arrivals, Lengths, PromptKind, Workload
from services.cli.options import flattened
from services.cli.target import find_target

app = typer.Typer(help="Measure an OpenAI-compatible server under load, or compare two measurements.")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What a measurement is asked for."""

    url: Annotated[str, typer.Option(help="Server, as http://host:port; else the running stack.")] = ""
    key: Annotated[str, typer.Option(help="API key; else MILLRACE_API_KEY, else the stack's own.")] = ""
    model: Annotated[str, typer.Option(help="Model; the first one listed when empty.")] = ""
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 64
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: requests at a time; 8 when not given.")
    ] = None
    rate: Annotated[float, typer.Option(min=0, help="Open loop: requests per second; 0 is closed.")] = 0.0
    burstiness: Annotated[float, typer.Option(min=0.01, help="1 is Poisson, less comes in bursts.")] = 1.0
    input_tokens: Annotated[str, typer.Option(help="256, uniform:64:512 or lognormal:256:0.5.")] = "256"
    output_tokens: Annotated[str, typer.Option(help="Same forms as --input-tokens.")] = "128"
    shared_prefix: Annotated[
        int, typer.Option(min=0, max=MAX_LENGTH, help="Tokens that all prompts begin with.")
    ] = 0
    tier: Annotated[list[str] | None, typer.Option(help="Share of a tier, as gold=0.2; repeat.")] = None
    prompts: Annotated[PromptKind, typer.Option(help="How prompts are made.")] = "token_ids"
    vocab_size: Annotated[int, typer.Option(min=2, help="Upper bound of random token ids.")] = 2000
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0
    warmup: Annotated[int, typer.Option(min=0, help="Requests sent before, not counted.")] = 1
    request_limit: Annotated[
        float, typer.Option(min=0.001, help="Seconds after which a request has failed.")
    ] = REQUEST_LIMIT_S
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds send equal requests.")] = 0
    ttft_target_ms: Annotated[float | None, typer.Option(min=0, help="Target for goodput.")] = None
    tpot_target_ms: Annotated[float | None, typer.Option(min=0, help="Target for goodput.")] = None
    e2e_target_ms: Annotated[float | None, typer.Option(min=0, help="Target for goodput.")] = None
    label: Annotated[str, typer.Option(help="Name of the run in reports.")] = "millrace"
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None
    ignore_eos: Annotated[bool, typer.Option(help="Ask for full-length answers.")] = True

    def workload(self) -> Workload:
        """What is sent; raises ConfigError that names the option."""
        return Workload(
            num_requests=self.requests,
            arrivals=_arrivals(self.concurrency, self.rate, self.burstiness),
            input_tokens=Lengths.parse(self.input_tokens),
            output_tokens=Lengths.parse(self.output_tokens),
            shared_prefix_tokens=self.shared_prefix,
            tiers=parse_tiers(self.tier or []),
            prompt_kind=self.prompts,
            vocab_size=self.vocab_size,
            token_id_low=min(300, self.vocab_size - 1),
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            seed=self.seed,
        )


@app.command("run")
@flattened
def run(options: BenchOptions) -> None:
    """Send a workload and print TTFT, TPOT, ITL, E2E, throughput and goodput."""
    console = Console()
    try:
        workload = options.workload()
        if options.json_file is not None:
            report.check_writable(options.json_file)
        stack = find_target(options.url)
        target = BenchTarget.parse(stack.url, options.key or stack.api_key)
        result = asyncio.run(_measure(console, target, stack.url, workload, options))
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
    console: Console, target: BenchTarget, url: str, workload: Workload, options: BenchOptions
) -> report.Result:
    model = await choose_model(target, options.model)
    label = escape(options.label)
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
                num_warmup=options.warmup,
                limit_s=options.request_limit,
                on_progress=advance,
            )
        except asyncio.CancelledError:
            # Ctrl-C: what was measured until then is shown, and written.
            if not ended:
                raise
            records = ended
            duration_s = time.perf_counter() - min(record.start_s for record in ended)
    return report.make_result(
        label=options.label,
        url=url,
        model=model,
        workload=workload,
        targets=Targets(
            ttft_ms=options.ttft_target_ms, tpot_ms=options.tpot_target_ms, e2e_ms=options.e2e_target_ms
        ),
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


def parse_tiers(texts: list[str]) -> dict[str, float]:
    tiers: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            share = float(number)
        except ValueError:
            share = 0.0
        if not (name and share > 0 and math.isfinite(share)) or name in tiers:
            raise ConfigError(
                f"--tier {text!r}: expected <name>=<share>, as in gold=0.2, once for each tier and above 0"
            )
        tiers[name] = share
    return tiers
