"""The process that loads a model, forked from one that has imported torch: for a small model, that import is
nearly all of its work.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from engine.model import loader

_SERVER = get_context("forkserver")
_IMPORTED = ["torch", "engine.model.reading", "kernels.linear.native", "kernels.selection", __name__]
_SERVER.set_forkserver_preload(_IMPORTED)


class _Forked:
    """What the core asks of its loader's `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], *, pass_fds: tuple[int], **_: Any) -> None:
        with Connection(os.dup(pass_fds[0])) as inherited:
            self._process = _SERVER.Process(target=_main, args=(command, inherited), daemon=True)
            self._process.start()

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode


def _main(command: Sequence[str], inherited: Connection) -> None:
    """As the process of that command, whose `--fd` is `inherited`."""
    sys.argv = list(command[command.index("--fd") - 1 :])
    sys.argv[2] = str(os.dup(inherited.fileno()))
    sys.exit(loader.main())


def subprocess_of_loader() -> SimpleNamespace:
    """What stands in for the loader's `subprocess`."""
    return SimpleNamespace(Popen=_Forked, DEVNULL=subprocess.DEVNULL)
