"""Fetches in the background what later stages need of networks and disks, while earlier ones compute."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.stages import commands
from tests.stages.table import ROOT, Stage


class Preparation:
    """Runs the stages' `prepare` one after the other, with what processors are left, in a thread of its own.

    Its outcome is nobody's: a stage's own command does the same again, finds it done, or fails by it. Output
    goes to build/prepare-<stage>.log.
    """

    def __init__(self, stages: Sequence[Stage], root: Path = ROOT) -> None:
        self._root = root
        self._stages = [stage for stage in stages if stage.prepare]
        self._done = {stage.name: threading.Event() for stage in self._stages}
        self._process: subprocess.Popen[bytes] | None = None
        self._ends = False
        # Around the start of a process, so that `end` misses none.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins, at the first call."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="prepare", daemon=True)
            self._thread.start()

    def is_done(self, name: str, wait_s: float) -> bool:
        """Whether nothing more is prepared for the stage; waits for that as long as `wait_s`."""
        return self._thread is None or name not in self._done or self._done[name].wait(wait_s)

    def end(self) -> None:
        """Ends what runs, and begins nothing more."""
        with self._lock:
            self._ends = True
        if self._process is not None:
            commands.end(self._process)
        for done in self._done.values():
            done.set()

    def _run(self) -> None:
        (self._root / "build").mkdir(exist_ok=True)
        for stage in self._stages:
            with (self._root / "build" / f"prepare-{stage.name}.log").open("wb") as log:
                with self._lock:
                    if self._ends:
                        return
                    command = f"renice -n 19 $$ >/dev/null; {stage.prepare}"
                    self._process = commands.start(command, self._root, output=log)
                self._process.wait()
            self._done[stage.name].set()
