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

import psutil

from benchmarks.gpu.report import append

# The exit code of a phase that found a wrong result.
WRONG = 3
# Kept back for the verdict, and for children to end.
RESERVE_S = 3.0
# How often processes are looked after, and how long ones that were killed may take to end.
POLL_S = 0.05
ENDING_S = 2.0


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
    # Whether those before it leave it the time that it needs.
    is_kept_for: bool = True


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
    # By a signal, which may come at any time: it is looked at where nothing can be lost.
    _is_told: bool = False

    def run(self) -> bool:
        """Whether all phases were done."""
        ends_s = time.monotonic() + self.limit_s - RESERVE_S
        reason = ""
        with self._listening():
            for place, phase in enumerate(self.phases):
                left = ends_s - time.monotonic()
                if self._is_told:
                    reason = "the lease was told to end"
                if reason:
                    self._note(phase, f"not run: {reason}", 0.0)
                elif left < phase.needs_s:
                    self._note(phase, f"not run: it needs {phase.needs_s:.0f} s, {left:.0f} s were left", 0.0)
                else:
                    later = sum(other.needs_s for other in self.phases[place + 1 :] if other.is_kept_for)
                    # A phase may use what those before it left over, but not what those after it need.
                    reason = self._run(phase, min(left, phase.most_s, max(phase.needs_s, left - later)))
        return all(outcome == "done" for outcome in self.outcomes.values())

    def _run(self, phase: Phase, limit_s: float) -> str:
        """Why the lease ends with it; empty when it goes on."""
        print(f"{phase.name} (up to {limit_s:.0f} s)", flush=True)
        began = time.monotonic()
        outcome = self._in_processes(phase, limit_s)
        self._note(phase, outcome, time.monotonic() - began)
        wrong = outcome == "wrong results" or (phase.decides and outcome.startswith("exit code"))
        return f"{phase.name} found {outcome}" if wrong and not self.goes_on else ""

    def _in_processes(self, phase: Phase, limit_s: float) -> str:
        ends_s = time.monotonic() + limit_s
        processes = [
            # Sessions of their own: a signal for the lease is not theirs.
            subprocess.Popen(
                [part.format(limit_s=limit_s) for part in command],
                env=dict(self.environment),
                start_new_session=True,
            )
            for command in phase.commands
        ]
        try:
            while None in (codes := [process.poll() for process in processes]):
                if self._is_told:
                    return "ended before it was done"
                if time.monotonic() > ends_s:
                    return "out of time"
                time.sleep(POLL_S)
        finally:
            _end(processes)
        if WRONG in codes:
            return "wrong results"
        return next((f"exit code {code}" for code in codes if code), "done")

    def _note(self, phase: Phase, outcome: str, seconds: float) -> None:
        self.outcomes[phase.name] = outcome
        fields: dict[str, Any] = {"phase": phase.name, "outcome": outcome, "seconds": seconds}
        append(self.path, fields)
        print(f"{phase.name}: {outcome}" + (f" after {seconds:.0f} s" if seconds else ""), flush=True)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """SIGTERM and SIGINT tell the lease to end."""

        def end(number: int, frame: object) -> None:
            self._is_told = True

        before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends processes and all that they started, in sessions of their own or not, and waits for that: the next
    phase wants the device's memory.
    """
    everyone: list[psutil.Process] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            everyone += psutil.Process(process.pid).children(recursive=True)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for each in everyone:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(everyone, timeout=ENDING_S)
