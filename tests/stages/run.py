"""Runs one stage, and once more, each alone, the tests that failed in it."""

from __future__ import annotations

import enum
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tests.stages import commands
from tests.stages.commands import interruption
from tests.stages.table import ROOT, Stage

# More tests than this do not fail by accident: they are not run again.
MAX_AGAIN = 10
# What cleans up after a stage has so long, whatever time the stage itself took.
_AFTER_S = 120.0


class Outcome(enum.Enum):
    """What became of a stage; the value is the word in the closing table."""

    GREEN = "green"
    UNSTEADY = "unsteady"
    RED = "red"
    LEFT_OUT = "left out"


@dataclass(frozen=True)
class Result:
    """One line of the closing table."""

    stage: str
    outcome: Outcome
    seconds: float
    note: str = ""
    # Names of tests that failed at first and passed alone.
    unsteady: tuple[str, ...] = ()
    # Names of tests that failed twice, or were not run again.
    failed: tuple[str, ...] = ()
    is_foundation: bool = False


@dataclass(frozen=True)
class Report:
    """What a run of tests told of itself through the file STAGE_REPORT; see `tests.stages.report`."""

    failed: tuple[str, ...]
    num_passed: int
    # Every test was collected and has run to some end, and nothing but tests has failed.
    is_whole: bool


def run_stage(stage: Stage, *, runs_all: bool) -> Result:
    """Its outcome; a stage that is left out says why. Prints what its commands print."""
    began_s = time.monotonic()
    if not runs_all and stage.is_unchanged():
        note = f"its files are those of {stage.mark.relative_to(ROOT)}"
        return Result(stage.name, Outcome.LEFT_OUT, 0.0, note)
    print(f"\n=== {stage.name}: {stage.command}", flush=True)
    digest = stage.digest()
    result = _lacking(stage) or _judge(stage, began_s + 60 * stage.limit_minutes)
    if stage.after:
        commands.clean_up(stage.after, ROOT, _AFTER_S)
    if stage.depends_on and result.outcome is Outcome.GREEN:
        stage.mark.parent.mkdir(parents=True, exist_ok=True)
        stage.mark.write_text(f"{digest}\n")
    elif stage.depends_on and result.outcome is not Outcome.LEFT_OUT:
        # What was found is not forgotten by the next run.
        stage.mark.unlink(missing_ok=True)
    return replace(result, seconds=time.monotonic() - began_s, is_foundation=stage.is_foundation)


def _lacking(stage: Stage) -> Result | None:
    """Left out, with the last line of what this machine says that it lacks; None where it lacks nothing."""
    if not stage.needs:
        return None
    with tempfile.TemporaryFile() as output:
        process = commands.start(stage.needs, ROOT, output=output)
        status = commands.wait(process, 60 * stage.limit_minutes)
        output.seek(0)
        said = output.read().decode(errors="replace").strip().splitlines() or [f"status {status}"]
    if status is None:
        return Result(stage.name, Outcome.RED, 0.0, _ended(stage))
    return Result(stage.name, Outcome.LEFT_OUT, 0.0, f"not to be had here: {said[-1]}") if status else None


def _ended(stage: Stage) -> str:
    if interruption.number:
        return f"ended by signal {interruption.number}"
    return f"not at its end after {stage.limit_minutes:g} minutes"


def _judge(stage: Stage, end_s: float) -> Result:
    status, report = _command(stage, {}, end_s)
    if status == 0 and (report is None or report.num_passed):
        return Result(stage.name, Outcome.GREEN, 0.0)
    if status is None:
        return Result(stage.name, Outcome.RED, 0.0, _ended(stage))
    if status == 0 or report is None or not report.is_whole or not report.failed:
        note = f"status {status}" if status else "no test passed"
        return Result(stage.name, Outcome.RED, 0.0, note, failed=report.failed[:MAX_AGAIN] if report else ())
    if len(report.failed) > MAX_AGAIN:
        note = f"{len(report.failed)} tests failed; more than {MAX_AGAIN} are not run again"
        return Result(stage.name, Outcome.RED, 0.0, note, failed=report.failed[:MAX_AGAIN])
    unsteady = tuple(name for name in report.failed if _passes_alone(stage, name, end_s))
    red = tuple(name for name in report.failed if name not in unsteady)
    # Of those that were not run again nobody knows more.
    note = _ended(stage) if red and (interruption.number or time.monotonic() > end_s) else ""
    return Result(stage.name, Outcome.RED if red else Outcome.UNSTEADY, 0.0, note, unsteady, red)


def _passes_alone(stage: Stage, name: str, end_s: float) -> bool:
    """Whether the test passes when nothing runs beside it. One that is skipped now has not passed."""
    if interruption.number or time.monotonic() > end_s:
        return False
    print(f"\n=== {stage.name}, once more and alone: {name}", flush=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(f"{name}\n")
        file.flush()
        # Names of cases have characters that shells and make read in their own ways.
        status, report = _command(stage, {"TESTS": f"@{file.name}", "WORKERS": "0"}, end_s)
    return status == 0 and report is not None and report.num_passed > 0


def _command(stage: Stage, variables: Mapping[str, str], end_s: float) -> tuple[int | None, Report | None]:
    """Exit status, None if the command was ended; and the report, None if no tests reported."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report"
        process = commands.start(stage.command, ROOT, {**variables, "STAGE_REPORT": str(path)})
        return commands.wait(process, end_s - time.monotonic()), _read(path)


def _read(path: Path) -> Report | None:
    if not path.exists():
        return None
    runs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return Report(
        failed=tuple(dict.fromkeys(name for each in runs for name in each["failed"])),
        num_passed=sum(each["num_passed"] for each in runs),
        is_whole=all(each["status"] in (0, 1) and each["is_whole"] for each in runs),
    )
