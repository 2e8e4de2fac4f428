"""Processes of the engine's own modules, forked from one that has imported what they need: for a small model,
these imports are nearly all of their work.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import psutil

from engine.model import loader
from engine.runner.ranks import worker

_MAINS = {"engine.model.loader": loader.main, "engine.runner.ranks.worker": worker.main}
# All that were not found to have ended.
_RANKS: list[_Forked] = []
_SERVER = get_context("forkserver")
_IMPORTED = ["torch", "engine.model.reading", "kernels.linear.native", "kernels.selection", __name__]
_SERVER.set_forkserver_preload(_IMPORTED)


class _Forked:
    """What its starter asks of `subprocess.Popen([PYTHON, …, "-m", MODULE, …], pass_fds=…)`."""

    def __init__(self, command: Sequence[str], *, pass_fds: tuple[int, ...], **_: Any) -> None:
        arguments = list(command[command.index("-m") + 1 :])
        inherited = {str(fd): Connection(os.dup(fd)) for fd in pass_fds}
        self._process = _SERVER.Process(target=_main, args=(arguments, inherited), daemon=True)
        self._ending = threading.Lock()
        self._process.start()
        for each in inherited.values():
            each.close()
        if arguments[0] == "engine.runner.ranks.worker":
            _RANKS.append(self)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int | None:
        if not connection.wait([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        # Threads that wait at the same time would each read the status.
        with self._ending:
            self._process.join()
        return self._process.exitcode

    @property
    def is_running(self) -> bool:
        return not connection.wait([self._process.sentinel], 0)

    @property
    def pid(self) -> int | None:
        return self._process.pid


def running_ranks() -> list[psutil.Process]:
    """Ranks that were forked for this process and have not ended."""
    _RANKS[:] = [each for each in _RANKS if each.is_running]
    return [psutil.Process(each.pid) for each in _RANKS]


def _main(arguments: list[str], inherited: dict[str, Connection]) -> None:
    """As the process of that module, among whose arguments are its descriptors as they were."""
    own = {fd: str(os.dup(each.fileno())) for fd, each in inherited.items()}
    sys.argv = [own.get(each, each) for each in arguments]
    sys.exit(_MAINS[arguments[0]]())


def forking_subprocess() -> SimpleNamespace:
    """What stands in for `subprocess` in who starts such processes."""
    return SimpleNamespace(
        Popen=_Forked, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
