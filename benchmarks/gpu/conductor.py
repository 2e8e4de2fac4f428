"""Runs phases one after another within a limit, each in processes of its own.

What is written is on the disk at once; a phase that runs out of time, or a lease that is told to end, loses
the row that was under way. A phase for which too little time is left is passed over and told. One that finds
a wrong result, or dies while it checks, ends the lease.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import append

# The exit code of a phase that found a wrong result.
WRONG = 3
# Kept back for the verdict, and for children to end.
RESERVE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Processes that run side by side, and end together. `{limit_s}` in a command is what they may take."""

    name: str
    commands: Sequence[Sequence[str]]
    # It is not begun with less time than this.
    needs_s: float
    # It may take more, when it can be had.
    most_s: float = float("inf")
    # Whether what comes after it means anything without it.
    decides: bool = False


class Ended(Exception):
    """The lease was told to end."""


@dataclass
class Lease:
    """Phases, the file of their rows, and the time for all of them."""

    phases: Sequence[Phase]
    path: Path
    limit_s: float
    environment: Mapping[str, str]
    # Goes on after a wrong result.
    goes_on: bool = False
    # What became of each phase.
    outcomes: dict[str, str] = field(default_factory=dict)

    def run(self) -> bool:
        """Whether all phases were done."""
        ends_s = time.monotonic() + self.limit_s - RESERVE_S
        reason = ""
        with _told_to_end():
            for place, phase in enumerate(self.phases):
                left = ends_s - time.monotonic()
                if reason:
                    self._note(phase, f"not run: {reason}", 0.0)
                elif left < phase.needs_s:
                    self._note(phase, f"not run: it needs {phase.needs_s:.0f} s, {left:.0f} s were left", 0.0)
                else:
                    later = sum(other.needs_s for other in self.phases[place + 1 :])
                    # A phase may use what those before it left over, but not what those after it need.
                    reason = self._run(phase, min(left, phase.most_s, max(phase.needs_s, left - later)))
        return all(outcome == "done" for outcome in self.outcomes.values())

    def _run(self, phase: Phase, limit_s: float) -> str:
        """Why the lease ends with it; empty when it goes on."""
        print(f"{phase.name} (up to {limit_s:.0f} s)", flush=True)
        began = time.monotonic()
        try:
            outcome = self._in_processes(phase, limit_s)
        except Ended:
            self._note(phase, "ended before it was done", time.monotonic() - began)
            return "the lease was told to end"
        self._note(phase, outcome, time.monotonic() - began)
        wrong = outcome == "wrong results" or (phase.decides and outcome.startswith("exit code"))
        return f"{phase.name} found {outcome}" if wrong and not self.goes_on else ""

    def _in_processes(self, phase: Phase, limit_s: float) -> str:
        ends_s = time.monotonic() + limit_s
        processes = [
            # Sessions of their own: what they start ends with them.
            subprocess.Popen(
                [part.format(limit_s=limit_s) for part in command],
                env=dict(self.environment),
                start_new_session=True,
            )
            for command in phase.commands
        ]
        try:
            codes = [process.wait(max(0.1, ends_s - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            return "out of time"
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if WRONG in codes:
            return "wrong results"
        return next((f"exit code {code}" for code in codes if code), "done")

    def _note(self, phase: Phase, outcome: str, seconds: float) -> None:
        self.outcomes[phase.name] = outcome
        fields: dict[str, Any] = {"phase": phase.name, "outcome": outcome, "seconds": seconds}
        append(self.path, fields)
        print(f"{phase.name}: {outcome}" + (f" after {seconds:.0f} s" if seconds else ""), flush=True)


@contextlib.contextmanager
def _told_to_end() -> Iterator[None]:
    """SIGTERM and SIGINT raise Ended."""

    def end(number: int, frame: object) -> None:
        raise Ended

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
