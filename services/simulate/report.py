"""What a simulation found, in the terminal and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from services.simulate.outcome import Figures, PredictionInterval, RunFigures, over_seeds


class _FigureRow(NamedTuple):
    """A line of the table."""

    name: str
    unit: str
    # From what `value` gives to the unit.
    factor: float
    value: Callable[[Figures], float]
    # No value is more.
    most: float = math.inf


_ROWS = (
    _FigureRow("goodput", "%", 100.0, lambda each: each.goodput, 1.0),
    _FigureRow("TTFT p50", "ms", 1000.0, lambda each: each.ttft_p50_s),
    _FigureRow("TTFT p99", "ms", 1000.0, lambda each: each.ttft_p99_s),
    _FigureRow("TPOT p50", "ms", 1000.0, lambda each: each.tpot_p50_s),
    _FigureRow("TPOT p99", "ms", 1000.0, lambda each: each.tpot_p99_s),
    _FigureRow("longest gap", "ms", 1000.0, lambda each: each.longest_gap_s),
    _FigureRow("output tokens/s", "", 1.0, lambda each: each.output_tokens_per_s),
    _FigureRow("refused", "", 1.0, lambda each: each.num_refused),
    _FigureRow("failed", "", 1.0, lambda each: each.num_failed),
    _FigureRow("continued elsewhere", "", 1.0, lambda each: each.num_continued),
)


class SimulatedAnswer(msgspec.Struct, kw_only=True):
    """What was asked, and what came of it."""

    load: str
    engine: str
    # None where as many as were allowed are too few.
    engines: int | None
    # Whether that number was looked for.
    is_searched: bool
    goodput_asked: float
    # (engines, worst goodput of the seeds) in the order in which they were tried.
    tried: list[tuple[int, float]]
    runs: list[RunFigures]
    # Virtual seconds for each second of this processor.
    speed_up: float

    @property
    def is_kept(self) -> bool:
        """Whether so large a part of the requests keeps its targets, with every seed."""
        return bool(self.runs) and all(each.total.goodput >= self.goodput_asked for each in self.runs)


def as_json(answer: SimulatedAnswer) -> bytes:
    """Figures of each run, and their intervals."""
    plain: dict[str, Any] = msgspec.to_builtins(answer)
    plain["is_kept"] = answer.is_kept
    tiers = _tiers(answer.runs)
    plain["intervals"] = {
        scope: {row.name: _known(_interval(answer.runs, scope, row)) for row in _ROWS}
        for scope in ("total", *tiers)
    }
    return msgspec.json.format(msgspec.json.encode(_known(plain)))


def _known(value: Any) -> Any:
    """JSON has no numbers that are none."""
    if isinstance(value, PredictionInterval):
        return _known(msgspec.to_builtins(value))
    if isinstance(value, dict):
        return {name: _known(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_known(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _engines(count: int) -> str:
    return "1 engine is" if count == 1 else f"{count} engines are"


def show(answer: SimulatedAnswer, console: Console) -> None:
    """A table: all requests, then each tier; with several seeds, where one more run would lie."""
    console.print(f"Load: {answer.load}", markup=False, soft_wrap=True)
    console.print(f"Engine: {answer.engine}", markup=False, soft_wrap=True)
    if answer.engines is None:
        most, worst = answer.tried[-1]
        console.print(
            f"[red]{_engines(most)} too few: {100 * worst:.1f} % keep their targets of "
            f"{100 * answer.goodput_asked:g} %.[/]"
        )
        return
    if answer.is_searched:
        console.print(f"[bold]{_engines(answer.engines)}[/] enough for {100 * answer.goodput_asked:g} %.")
    tiers = _tiers(answer.runs)
    scopes = ("total", *tiers) if len(tiers) > 1 else ("total",)
    table = Table("", *("all" if each == "total" else each for each in scopes), box=None)
    for row in _ROWS:
        cells = [_cell(_interval(answer.runs, scope, row), row.factor) for scope in scopes]
        table.add_row(f"{row.name} {row.unit}".strip(), *cells)
    console.print(table)
    hours = over_seeds(answer.runs, lambda run: run.engine_s / 3600)
    busy = over_seeds(answer.runs, lambda run: 100 * run.busy_s / run.engine_s if run.engine_s else 0.0)
    console.print(
        f"{hours.mean:.2f} engine-hours, of which {busy.mean:.0f} % computing; "
        f"{answer.runs[0].total.num_requests} requests in {answer.runs[0].duration_s:.0f} s, simulated "
        f"{answer.speed_up:.0f} times as fast.",
        soft_wrap=True,
    )
    if len(answer.runs) > 1:
        told = f"[low … high]: where nine of ten further runs would lie, by {len(answer.runs)} seeds."
        console.print(told, markup=False)


def _tiers(runs: Sequence[RunFigures]) -> list[str]:
    return sorted({tier for run in runs for tier in run.tiers})


def _interval(runs: Sequence[RunFigures], scope: str, row: _FigureRow) -> PredictionInterval:
    def value(run: RunFigures) -> float:
        return row.value(run.total if scope == "total" else run.tiers.get(scope, Figures()))

    return over_seeds(runs, value, row.most)


def _cell(found: PredictionInterval, factor: float) -> str:
    if math.isnan(found.mean):
        return "-"
    text = f"{found.mean * factor:.4g}"
    if found.low == found.high:
        return text
    return f"{text} [dim]\\[{found.low * factor:.4g} … {found.high * factor:.4g}][/]"
