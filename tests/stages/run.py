"""Runs one stage, and once more, each alone, the tests that failed in it."""

from __future__ import annotations

import enum
import json
import subprocess
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
    # All failures are those of tests: none of collection, none of pytest.
    is_whole: bool


def run_stage(stage: Stage, *, runs_all: bool) -> Result:
    """Its outcome; a stage that is left out says why. Prints what its commands print."""
    began_s = time.monotonic()
    if not runs_all and stage.is_unchanged():
        note = f"its files are those of {stage.mark.relative_to(ROOT)}"
        return Result(stage.name, Outcome.LEFT_OUT, 0.0, note)
    print(f"\n=== {stage.name}: {stage.command}", flush=True)
    if stage.needs and (missing := _missing(stage.needs)):
        return Result(stage.name, Outcome.LEFT_OUT, time.monotonic() - began_s, missing)
    digest = stage.digest()
    result = _judge(stage)
    if stage.after:
        commands.start(stage.after, ROOT).wait()
    if result.outcome is Outcome.GREEN and stage.depends_on:
        stage.mark.parent.mkdir(parents=True, exist_ok=True)
        stage.mark.write_text(f"{digest}\n")
    return replace(result, seconds=time.monotonic() - began_s, is_foundation=stage.is_foundation)


def _missing(needs: str) -> str:
    """The last line of what this machine says that it lacks; empty where it lacks nothing."""
    done = subprocess.run(
        ["bash", "-c", needs], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    said = (done.stdout + done.stderr).strip().splitlines() or [f"status {done.returncode}"]
    return f"not to be had here: {said[-1]}" if done.returncode else ""


def _judge(stage: Stage) -> Result:
    status, report = _command(stage, {})
    if status == 0:
        return Result(stage.name, Outcome.GREEN, 0.0)
    if interruption.number:
        return Result(stage.name, Outcome.RED, 0.0, f"ended by signal {interruption.number}")
    if status is None:
        return Result(stage.name, Outcome.RED, 0.0, f"not at its end after {stage.limit_minutes:g} minutes")
    if report is None or not report.is_whole or not report.failed:
        return Result(stage.name, Outcome.RED, 0.0, f"status {status}")
    if len(report.failed) > MAX_AGAIN:
        note = f"{len(report.failed)} tests failed; more than {MAX_AGAIN} are not run again"
        return Result(stage.name, Outcome.RED, 0.0, note, failed=report.failed[:MAX_AGAIN])
    red = tuple(name for name in report.failed if not _passes_alone(stage, name))
    unsteady = tuple(name for name in report.failed if name not in red)
    return Result(stage.name, Outcome.RED if red else Outcome.UNSTEADY, 0.0, "", unsteady, red)


def _passes_alone(stage: Stage, name: str) -> bool:
    """Whether the test passes when nothing runs beside it. One that is skipped now has not passed."""
    print(f"\n=== {stage.name}, once more and alone: {name}", flush=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(f"{name}\n")
        file.flush()
        # Names of cases have characters that shells and make read in their own ways.
        status, report = _command(stage, {"TESTS": f"@{file.name}", "WORKERS": "0"})
    return status == 0 and report is not None and report.num_passed > 0


def _command(stage: Stage, variables: Mapping[str, str]) -> tuple[int | None, Report | None]:
    """Exit status, None if the command was ended; and the report, None if no tests reported."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report"
        process = commands.start(stage.command, ROOT, {**variables, "STAGE_REPORT": str(path)})
        return commands.wait(process, 60 * stage.limit_minutes), _read(path)


def _read(path: Path) -> Report | None:
    if not path.exists():
        return None
    runs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return Report(
        failed=tuple(dict.fromkeys(name for each in runs for name in each["failed"])),
        num_passed=sum(each["num_passed"] for each in runs),
        is_whole=all(each["status"] in (0, 1) for each in runs),
    )
