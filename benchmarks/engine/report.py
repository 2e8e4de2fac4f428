"""Prints figures side by side and writes them as JSON, with the machine and the versions."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from services.bench.report import machine

Row = Mapping[str, str | float | int]


def options(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the option that all of these programs share; `doc` is the program's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=None, help="write the figures there as well")
    return parser


def publish(title: str, rows: Sequence[Row], path: Path | None, notes: str = "") -> None:
    """One table, baseline and ours in it; floats with three significant digits."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    console = Console(width=170)
    console.print(table)
    if notes:
        console.print(notes)
    if path is not None:
        about = machine() | {"load_average": os.getloadavg()[0]}
        versions = {name: version(name) for name in ("grpcio", "msgspec")}
        report = {"title": title, "rows": rows, "notes": notes, "machine": about, "versions": versions}
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie; nan when there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
