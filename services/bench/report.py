"""Shows results in the terminal, keeps them as JSON, and compares two of them."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from runtime.errors import ConfigError
from runtime.resources import cpuinfo
from services.bench.records import Percentiles, RequestRecord, Summary, Targets, summarize
from services.bench.workload import Workload


class MeasuredRun(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, when and on what: enough to do it again."""

    label: str
    url: str
    model: str
    # ISO 8601, UTC.
    measured_at: str
    machine: dict[str, str]
    workload: Workload
    targets: Targets


class Result(MeasuredRun, frozen=True, kw_only=True):
    """One run, which can be compared with another."""

    total: Summary
    by_tier: dict[str, Summary]
    # First distinct errors with their counts.
    errors: dict[str, int]


def make_result(
    *,
    label: str,
    url: str,
    model: str,
    workload: Workload,
    targets: Targets,
    records: Sequence[RequestRecord],
    duration_s: float,
) -> Result:
    """Figures over all requests, and over each tier when there are several."""
    tiers = sorted({record.tier for record in records if record.tier})
    errors: dict[str, int] = {}
    for record in records:
        if not record.ok:
            errors[record.error or f"HTTP {record.status}"] = errors.get(record.error, 0) + 1
    return Result(
        label=label,
        url=url,
        model=model,
        measured_at=now(),
        machine=machine(),
        workload=workload,
        targets=targets,
        total=summarize(records, duration_s, targets),
        by_tier={
            tier: summarize([record for record in records if record.tier == tier], duration_s, targets)
            for tier in tiers
        },
        errors=dict(list(errors.items())[:10]),
    )


def now() -> str:
    """This moment, as results have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": str(psutil.cpu_count()),
        "cpu": cpu_name(),
        "memory_gib": f"{psutil.virtual_memory().total / 2**30:.1f}",
    }


def cpu_name() -> str:
    """What the system calls its processor."""
    return next(iter(cpuinfo("model name")), platform.processor() or platform.machine())


def write(result: msgspec.Struct, path: Path) -> None:
    """Writes a result as JSON."""
    write_text(msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n", path, "--json")


def write_text(text: str, path: Path, option: str) -> None:
    """Writes a file; raises ConfigError that names the option."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error}") from error


def check_writable(path: Path, option: str = "--json") -> None:
    """Raises ConfigError when a result cannot be written there: better before a long run than after it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error}") from error


def read(path: Path) -> Result:
    """Reads a result; raises ConfigError when the file is not one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Result)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a result of `millrace bench`: {error}") from error


# Title, attribute of Summary, and whether more is better (None: neither).
_RATES = (
    ("requests", "num_requests", None),
    ("failed", "num_failed", False),
    ("duration s", "duration_s", False),
    ("prompt tokens", "prompt_tokens", None),
    ("of them cached", "cached_prompt_tokens", None),
    ("output tokens", "completion_tokens", None),
    ("requests/s", "requests_per_s", True),
    ("output tok/s", "output_tokens_per_s", True),
    ("total tok/s", "total_tokens_per_s", True),
    ("goodput/s", "goodput_per_s", True),
)
_LATENCIES = (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms"), ("E2E", "e2e_ms"))


def show(result: Result, console: Console) -> None:
    """Prints rates and latencies, per tier when there are several, and what failed."""
    columns: dict[str, Summary] = {"all": result.total, **(result.by_tier if len(result.by_tier) > 1 else {})}
    console.print(_rate_table(escape(f"{result.label}: {result.model} at {result.url}"), columns))
    for name, summary in columns.items():
        table = Table(title=escape(f"latency in ms ({name})") if len(columns) > 1 else "latency in ms")
        table.add_column("")
        for heading in Percentiles.__struct_fields__:
            table.add_column(heading, justify="right")
        for title, attribute in _LATENCIES:
            percentiles = getattr(summary, attribute)
            if percentiles is not None:
                table.add_row(title, *(f"{value:,.1f}" for value in msgspec.structs.astuple(percentiles)))
        if table.row_count:
            console.print(table)
    for error, count in result.errors.items():
        console.print(f"[red]{count} x[/] {escape(error)}", highlight=False)


def _rate_table(title: str, columns: Mapping[str, Summary]) -> Table:
    table = Table(title=title)
    table.add_column("")
    for name in columns:
        table.add_column(escape(name), justify="right")
    for heading, attribute, _ in _RATES:
        values = [getattr(summary, attribute) for summary in columns.values()]
        if any(value is not None for value in values):
            table.add_row(heading, *("" if value is None else f"{value:,}" for value in values))
    return table


def show_comparison(before: Result, after: Result, console: Console) -> None:
    """Prints two results side by side with the ratio after/before."""
    if before.workload != after.workload:
        console.print("[yellow]The two runs had different workloads; ratios compare unlike things.[/]")
    table = Table(title=escape(f"{before.label} and {after.label}"))
    for heading in ("", before.label, after.label, "ratio"):
        table.add_column(escape(heading), justify="right" if heading else "left")
    for heading, attribute, more_is_better in _RATES:
        _compare_row(
            table, heading, getattr(before.total, attribute), getattr(after.total, attribute), more_is_better
        )
    for heading, attribute in _LATENCIES:
        pair = getattr(before.total, attribute), getattr(after.total, attribute)
        if None not in pair:
            for quantile in ("p50", "p99"):
                first, second = (getattr(percentiles, quantile) for percentiles in pair)
                _compare_row(table, f"{heading} {quantile} ms", first, second, False)
    console.print(table)


def _compare_row(
    table: Table, heading: str, first: float | None, second: float | None, more_is_better: bool | None
) -> None:
    if first is None or second is None:
        return
    ratio = second / first if first else float("nan")
    better = more_is_better is not None and ratio != 1 and (ratio > 1) == more_is_better
    colour = "" if more_is_better is None or ratio == 1 else ("[green]" if better else "[red]")
    table.add_row(heading, f"{first:,}", f"{second:,}", f"{colour}{ratio:.2f}" if first else "")
