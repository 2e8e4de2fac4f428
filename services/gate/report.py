"""What a run found: in the terminal, as JSON and as JUnit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from runtime.errors import ConfigError
from services.gate.cases import GateVerdict
from services.gate.run import Comparison
from services.gate.verdict import Cell, LayerResult

STYLES = {GateVerdict.WORSE: "red", GateVerdict.NOT_WORSE: "green", GateVerdict.NOT_ENOUGH: "yellow"}
UNITS = {"tokens": "distance", "intrinsic": "nats/token"}


def told(result: LayerResult) -> str:
    """The verdict of a layer in words."""
    match result.verdict:
        case GateVerdict.WORSE:
            return f"worse by {result.difference:.3g}"
        case GateVerdict.NOT_WORSE:
            return f"not worse by more than {result.delta:g}"
    if result.more_needed is None:
        return "not enough cases yet: too close to tell by such cases"
    return f"not enough cases yet: about {result.more_needed} more"


def show(comparison: Comparison, console: Console) -> None:
    """Prints the table of layers, the heat map and the verdict."""
    for each in comparison.layers:
        name = each.layer if each.decides else f"{each.layer} (told only)"
        console.print(Text(f"{name}: {told(each)}", STYLES[each.verdict]), soft_wrap=True)
    table = Table("layer", "baseline", "candidate", "difference", "bounds", "p", "questions")
    for each in comparison.layers:
        table.add_row(
            each.layer,
            f"{each.baseline:.3f}",
            f"{each.candidate:.3f}",
            f"{each.difference:+.4f}",
            f"{each.lower:+.3f} … {each.upper:+.3f}",
            f"{each.p_value:.2g}",
            str(each.num_questions),
        )
    console.print(table)
    for each in comparison.layers:
        if each.note:
            console.print(f"{each.layer}: {each.note}", style="yellow", markup=False, soft_wrap=True)
        if each.cells:
            show_heat_map(each.cells, console)
    baseline, candidate = comparison.baseline, comparison.candidate
    console.print(
        f"{candidate.named} against {baseline.named}: {comparison.verdict}",
        style=f"bold {STYLES[comparison.verdict]}",
        markup=False,
        soft_wrap=True,
    )


def show_heat_map(cells: Sequence[Cell], console: Console) -> None:
    """What the candidate found by depth (rows) and length (columns), with what the baseline did."""
    lengths = sorted({cell.length for cell in cells})
    by_place = {(cell.depth, cell.length): cell for cell in cells}
    table = Table(
        "depth", *(f"{length} tokens" for length in lengths), title="needles found, candidate (baseline)"
    )
    for depth in sorted({cell.depth for cell in cells}):
        row: list[Text] = []
        for length in lengths:
            cell = by_place.get((depth, length))
            row.append(Text("") if cell is None else _shaded(cell))
        table.add_row(f"{depth:.0%}", *row)
    console.print(table)


def _shaded(cell: Cell) -> Text:
    red, green = round(220 * (1 - cell.candidate)), round(160 * cell.candidate)
    return Text(f" {cell.candidate:4.0%} ({cell.baseline:.0%}) ", f"white on rgb({red},{green},60)")


def to_json(comparison: Comparison) -> bytes:
    """All of it, for programs; scores, bounds and the cases that lost most."""
    return msgspec.json.format(msgspec.json.encode(comparison), indent=2) + b"\n"


def to_junit(comparison: Comparison) -> bytes:
    """One test a layer: worse is a failure, undecided an error; what does not decide is skipped."""
    suite = ElementTree.Element("testsuite", name=f"millrace gate: {comparison.suite.name}")
    counts = {"failure": 0, "error": 0, "skipped": 0}
    for each in comparison.layers:
        case = ElementTree.SubElement(suite, "testcase", classname="gate", name=each.layer)
        kind = {GateVerdict.WORSE: "failure", GateVerdict.NOT_ENOUGH: "error"}.get(each.verdict, "")
        if kind and not each.decides:
            kind = "skipped"
        if kind:
            counts[kind] += 1
            ElementTree.SubElement(case, kind, message=told(each)).text = "\n".join(
                f"{lost.case.id}: {lost.baseline:.3g} -> {lost.candidate:.3g}" for lost in each.lost
            )
    suite.set("tests", str(len(comparison.layers)))
    suite.set("failures", str(counts["failure"]))
    suite.set("errors", str(counts["error"]))
    suite.set("skipped", str(counts["skipped"]))
    return bytes(ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)) + b"\n"


def write(path: Path, content: bytes) -> None:
    """Replaces a file as a whole."""
    temporary = path.with_name(f"{path.name}.part")
    temporary.write_bytes(content)
    temporary.replace(path)


def check_writable(*paths: Path | None) -> None:
    """Raises ConfigError before anything is asked, if a report would have no place."""
    for path in paths:
        if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
            raise ConfigError(
                f"{path}: it cannot be written; name a file in a folder that exists and is yours"
            )
