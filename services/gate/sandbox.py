"""Runs what a model wrote, and says exactly what holds it.

A program runs in a Python process of its own (`python -I -S`): a session of its own that is killed as a
whole, an empty environment, a folder of its own that is deleted, no standard input; at most `_CPU_S` seconds
of processor, `_WALL_S` of time, `_MEMORY_BYTES` of addresses, files of `_FILE_BYTES`, `_FILES` open at a
time. Confined, which takes Linux, it has user, network and IPC namespaces of its own: no network, not even
this machine's.

Not confined are this user's files: a program can read them, and write where this user may. What leaves its
session on purpose is not ended. Where that matters, run the gate as a user that owns nothing, or in a
container.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile

from runtime.errors import ConfigError

_CPU_S = 5
_WALL_S = 10.0
_MEMORY_BYTES = 1 << 30
_FILE_BYTES = 1 << 20
_FILES = 32
_LIMITS = (("CPU", _CPU_S), ("AS", _MEMORY_BYTES), ("FSIZE", _FILE_BYTES), ("NOFILE", _FILES), ("CORE", 0))
# Statuses of the process before the program runs, and after it ended well.
_NO_NAMESPACE = 96
_PASSED = 97

# The kernel's constants (sched.h): CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWIPC.
_NAMESPACES = 0x10000000 | 0x40000000 | 0x08000000
# What the process does first. A program passes by coming to its end: leaving early with status 0 is no
# success. One that means to cheat could name the status itself.
_BEGIN = f"""
import os, sys
if sys.argv[1] == "confined":
    try:
        import ctypes
        cut = ctypes.CDLL(None, use_errno=True).unshare({_NAMESPACES}) == 0
    except (OSError, AttributeError):
        cut = False
    if not cut:
        os._exit({_NO_NAMESPACE})
import resource
for name, most in {_LIMITS}:
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
program = sys.argv[2]
sys.argv[:] = ["program"]
exec(compile(program, "program", "exec"), {{"__name__": "__main__"}})
os._exit({_PASSED})
"""


class Sandbox:
    """Where programs run. Raises ConfigError if they could not be kept from the network, and should be."""

    def __init__(self, mode: str) -> None:
        """`mode` is "confined" or "with network"."""
        self._mode = mode
        if self._run("pass") == _NO_NAMESPACE:
            raise ConfigError(
                "[task] run_code: this system makes no network namespace for programs, so they would reach "
                'the network; run the gate where it does (Linux with user namespaces), or set "with network"'
            )

    def passes(self, program: str, test: str) -> bool:
        """Whether program and test end without an error within the limits."""
        return self._run(f"{program}\n\n{test}\n") == _PASSED

    def _run(self, program: str) -> int:
        with tempfile.TemporaryDirectory(prefix="gate-") as folder:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _BEGIN, self._mode, program],
                    cwd=folder,
                    env={},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except (OSError, ValueError):
                # Too long for an argument, or with a zero byte, which is no program either.
                return 1
            try:
                return process.wait(_WALL_S)
            except subprocess.TimeoutExpired:
                return 1
            finally:
                # Also what it started.
                _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()
