"""Commands in process groups of their own, which end with all that they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

# What is told to end has so long to clean up.
_GRACE_S = 30.0
# So often a signal is looked for.
_LOOK_S = 0.5
# What a make that has started this process tells those that it starts: its own arguments would win over what
# a stage is given.
_OF_MAKE = ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL", "ARGS")


class Interruption:
    """A signal that ends the whole run. It is looked at between waits, so that no process is lost."""

    number = 0

    def arrive(self, number: int, frame: object) -> None:
        """The handler of the signal."""
        self.number = number


interruption = Interruption()


def start(
    command: str, root: Path, variables: Mapping[str, str] | None = None, output: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Gives the command to bash in `root`; it prints where this process does, or to `output`."""
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_MAKE}
    return subprocess.Popen(
        ["bash", "-c", command],
        cwd=root,
        env={**inherited, **(variables or {})},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        start_new_session=True,
    )


def wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """The exit status; None where it was ended, by the limit or by a signal for the whole run."""
    end_s = time.monotonic() + limit_s
    status = None
    while status is None and not interruption.number and time.monotonic() < end_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(min(_LOOK_S, max(0.0, end_s - time.monotonic())))
    _end(process)
    return status


def clean_up(command: str, root: Path, limit_s: float) -> None:
    """Runs the command to its end, or to the limit, also where a signal ends the whole run."""
    process = start(command, root)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(limit_s)
    _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends it with everything that it has started."""
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
