"""Shows a sweep in the terminal, and says what it found; its record as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.bench.records import Targets
from services.bench.report import MeasuredRun, machine, now
from services.bench.sweep import SweepEnd, SweepPoint, SweepTarget
from services.bench.workload import Workload


class Sweep(MeasuredRun, frozen=True, kw_only=True):
    """A whole sweep. `workload` is that of the first rate."""

    wanted: SweepTarget
    # In the order of the rates.
    points: list[SweepPoint]
    ended: SweepEnd
    # The highest rate that was kept, and the lowest above it that was missed; None where there is none.
    kept_rate: float | None
    missed_rate: float | None

    @classmethod
    def of(
        cls,
        *,
        label: str,
        url: str,
        model: str,
        workload: Workload,
        wanted: SweepTarget,
        targets: Targets,
        points: Sequence[SweepPoint],
        ended: SweepEnd,
    ) -> Sweep:
        """From the points as they were measured."""
        return cls(
            label=label,
            url=url,
            model=model,
            measured_at=now(),
            machine=machine(),
            workload=workload,
            wanted=wanted,
            targets=targets,
            points=sorted(points, key=lambda point: point.rate),
            ended=ended,
            kept_rate=max((point.rate for point in points if point.is_kept), default=None),
            missed_rate=min((point.rate for point in points if not point.is_kept), default=None),
        )

    @property
    def found(self) -> str:
        """What the sweep says, in a sentence."""
        if self.kept_rate is None:
            return f"No rate kept the target; the lowest one tried was {self.points[0].rate:g} requests/s."
        best = next(point for point in self.points if point.rate == self.kept_rate)
        carried = f"{best.rate:g} requests/s ({best.summary.output_tokens_per_s:g} output tokens/s)"
        if self.ended == "highest":
            return f"At least {carried} keep the target: no higher rate was allowed (--highest)."
        if self.ended == "points":
            above = "" if self.missed_rate is None else f", and {self.missed_rate:g} do not"
            return f"{carried} keep the target{above}: no more runs were allowed (--points)."
        return f"{carried} keep the target; {self.missed_rate:g} do not."

    @property
    def warnings(self) -> list[str]:
        """What a reader must know before believing it."""
        limited = [point for point in self.points if point.is_clients_limit]
        if not limited:
            return []
        rates = ", ".join(f"{point.rate:g}" for point in limited)
        return [
            f"At {rates} requests/s the load generator was itself the limit: it sent up to "
            f"{max(point.late_p99_ms for point in limited):.0f} ms late (p99) and used up to "
            f"{max(point.busy_share for point in limited):.0%} of a core. Run it on another machine than the "
            "server, or ask for shorter answers (--output-tokens)."
        ]


def show_sweep(sweep: Sweep, console: Console) -> None:
    """Prints the curve, what was found, and warnings."""
    table = Table(title=escape(f"{sweep.label}: {sweep.model} at {sweep.url}"))
    headings = (
        "requests/s",
        "answered/s",
        "output tok/s",
        "TTFT p99 ms",
        "gap p99 ms",
        "goodput",
        "failed",
        "",
    )
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    for point in sweep.points:
        verdict = "[green]kept[/]" if point.is_kept else f"[red]missed: {', '.join(point.missed)}[/]"
        table.add_row(
            f"{point.rate:,.4g}",
            f"{point.summary.requests_per_s:,.4g}",
            f"{point.summary.output_tokens_per_s:,.4g}",
            _shown(point.ttft_p99_ms),
            _shown(point.gap_p99_ms),
            "" if point.goodput is None else f"{point.goodput:.1%}",
            str(point.summary.num_failed),
            verdict + (" [yellow](client's limit)[/]" if point.is_clients_limit else ""),
        )
    console.print(table)
    console.print(escape(sweep.found), highlight=False)
    for warning in sweep.warnings:
        console.print(f"[yellow]{escape(warning)}[/]", highlight=False)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"
