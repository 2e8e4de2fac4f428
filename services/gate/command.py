"""`millrace gate`: the command line of the quality gate."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from contract.errors import MillraceError, invalid
from contract.retention import Retention
from contract.retention import check as check_retention
from runtime.errors import ConfigError
from services.cli.options import flattened
from services.cli.target import ServerTarget, find_target, running_stack
from services.cli.temporary import temporary_stack
from services.cli.verdicts import judging
from services.gate import heat_map, page, report
from services.gate.cases import EXIT_STATUS, GateVerdict, LayerName
from services.gate.client import Endpoint, GateClient
from services.gate.run import Comparison, GateRun
from services.gate.suite import check_cases, read_suite
from services.supervisor.config import state_directory

_notes = Console(stderr=True, highlight=False)
_SERVER_HELP = (
    "URL (http://host:port, with #MODEL for one of several), a model of the running stack, or a checkpoint "
    "to serve meanwhile, as `up --model` takes it."
)
_URL = re.compile(r"(https?://|[\w.-]+:\d+(?:$|#|/))")


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """What a comparison is asked for."""

    baseline: Annotated[str, typer.Option(help=f"What is good: {_SERVER_HELP}")]
    candidate: Annotated[str, typer.Option(help="What is judged, named in the same ways.")]
    suite: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="suite.toml; all six layers, generated, when left out."
        ),
    ] = None
    candidate_key: Annotated[
        str, typer.Option(help="API key of the candidate, where it is not that of MILLRACE_API_KEY.")
    ] = ""
    kv: Annotated[
        str,
        typer.Option(
            help="What the candidate's answers forget of their prompts, as POLICY:KEEP: snapkv:0.5 keeps "
            "half, snapkv:512 so many tokens."
        ),
    ] = ""
    judge_key: Annotated[
        str,
        typer.Option(help="API key of the suite's judge, where it is not at the baseline's address."),
    ] = ""
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None
    junit: Annotated[Path | None, typer.Option(help="Write a JUnit file here.")] = None
    html: Annotated[Path | None, typer.Option(help="Write a page here, one file that loads nothing.")] = None
    png: Annotated[Path | None, typer.Option(help="Write the needles' heat map here.")] = None
    cache: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Where answers are kept; gate/ of the state directory."),
    ] = None
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Requests at a time, of each server.")] = 8
    fresh: Annotated[bool, typer.Option("--fresh", help="Ask the baseline anew, and begin anew.")] = False
    all_cases: Annotated[
        bool, typer.Option("--all-cases", help="Ask all cases, though a layer is decided before.")
    ] = False


@flattened
def gate(options: GateOptions) -> None:
    """Judge whether a candidate's answers are worse than a baseline's.

    Ends with 0 if they are not worse, 1 if they are, 2 where nothing can be compared, 3 when more cases are
    needed. Interrupted, the same command goes on.
    """
    console = Console(highlight=False)
    with judging(_notes):
        suite = read_suite(options.suite)
        if options.png is not None and suite.long_context is None:
            raise ConfigError("--png: the suite has no needles to draw; add [long_context] to it")
        kv = _kv(options.kv)
        check_cases(suite, options.suite)
        report.check_writable(options.json_file, options.junit, options.html, options.png)
        with ExitStack() as stacks:
            baseline = stacks.enter_context(_endpoint("--baseline", options.baseline, ""))
            candidate = stacks.enter_context(
                _endpoint("--candidate", options.candidate, options.candidate_key)
            )
            candidate = msgspec.structs.replace(candidate, kv=kv)
            run = GateRun(
                suite,
                suite_folder=options.suite.parent if options.suite else Path(),
                folder=options.cache or state_directory() / "gate",
                concurrency=options.concurrency,
                fresh=options.fresh,
                all_cases=options.all_cases,
                judge_key=options.judge_key,
            )
            found = asyncio.run(compare_shown(run, baseline, candidate))
        report.show(found, console)
        _write(options, found)
    raise typer.Exit(EXIT_STATUS[found.verdict])


def _kv(asked: str) -> dict[str, Any] | None:
    """`--kv` as requests have it; None where it is empty. Raises ConfigError."""
    if not asked:
        return None
    policy, _, number = asked.partition(":")
    try:
        found = {"keep": float(number)} if float(number) <= 1 else {"window_tokens": int(number)}
    except ValueError:
        raise ConfigError(f"--kv {asked!r}: give POLICY:KEEP, as in snapkv:0.5 or snapkv:512") from None
    try:
        check_retention(msgspec.convert({"policy": policy, **found}, Retention), invalid, "--kv")
    except MillraceError as error:
        raise ConfigError(error.message) from error
    return {"policy": policy, **found}


@contextmanager
def _endpoint(option: str, named: str, key: str) -> Iterator[Endpoint]:
    """What `--baseline` or `--candidate` names, served as long as it is needed. Raises ConfigError."""
    address, _, model = named.partition("#")
    if _URL.match(address):
        yield endpoint_of(find_target(address), model, key)
        return
    stack = running_stack()
    if not Path(named).exists() and stack is not None and asyncio.run(_serves(find_target(), named)):
        yield endpoint_of(find_target(), named, key)
        return
    _notes.print(f"{option}: starting a stack that serves {named}", markup=False, soft_wrap=True)
    with temporary_stack(named) as target:
        yield endpoint_of(target)


def endpoint_of(target: ServerTarget, model: str = "", key: str = "") -> Endpoint:
    """A server as the gate asks it; its only model unless one is named."""
    return Endpoint(url=target.url, model=model, api_key=key or target.api_key)


async def _serves(target: ServerTarget, model: str) -> bool:
    async with GateClient(endpoint_of(target)) as client:
        return model in [card["id"] for card in await client.cards()]


async def compare_shown(run: GateRun, baseline: Endpoint, candidate: Endpoint) -> Comparison:
    """The comparison, with its progress on standard error. Raises ConfigError."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_notes, transient=True) as progress:
        tasks: dict[LayerName, TaskID] = {}

        def advance(layer: LayerName, done: int, total: int, verdict: GateVerdict) -> None:
            if layer not in tasks:
                tasks[layer] = progress.add_task(layer, total=total)
            progress.update(tasks[layer], completed=done, description=f"{layer}: {verdict}")

        return await run.compare(baseline, candidate, advance)


def _write(options: GateOptions, found: Comparison) -> None:
    if options.json_file is not None:
        report.write(options.json_file, report.to_json(found))
    if options.junit is not None:
        report.write(options.junit, report.to_junit(found))
    if options.html is not None:
        report.write(options.html, page.to_html(found).encode())
    cells = next((each.cells for each in found.layers if each.cells), ())
    if options.png is not None and cells:
        report.write(options.png, heat_map.to_png(cells))
