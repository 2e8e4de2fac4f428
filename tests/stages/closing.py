"""The closing table: the last thing that a run of the stages prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.stages.run import Outcome, Result


def write(results: Sequence[Result], asked: Sequence[str], seconds: float, root: Path) -> str:
    """The table; writes build/unsteady.txt below `root`, a line `STAGE NAME` for each unsteady test."""
    unsteady = [f"{result.stage} {name}" for result in results for name in result.unsteady]
    (root / "build").mkdir(exist_ok=True)
    (root / "build" / "unsteady.txt").write_text("".join(f"{line}\n" for line in unsteady), encoding="utf-8")
    rows = [(each.stage, each.outcome.value, _clock(each.seconds), each.note) for each in results]
    rows += [(name, "not run", "", "") for name in asked[len(results) :]]
    rows.append(("all", _word(results, asked), _clock(seconds), ""))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["", "stages:"]
    for stage, word, took, note in rows:
        line = f"  {stage:<{widths[0]}}  {word:<{widths[1]}}  {took:>{widths[2]}}  {note}"
        lines.append(line.rstrip())
        result = next((each for each in results if each.stage == stage), None)
        if result is not None:
            lines += [f"      unsteady: {name}" for name in result.unsteady]
            lines += [f"      failed: {name}" for name in result.failed]
    return "\n".join(lines)


def _word(results: Sequence[Result], asked: Sequence[str]) -> str:
    if len(results) < len(asked) or any(each.outcome is Outcome.RED for each in results):
        return Outcome.RED.value
    return Outcome.GREEN.value


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"
