"""Loads the native library and runs ops.

An op's args are a ctypes Structure that mirrors its C++ struct; `Op` checks their sizes against each other.
Whoever makes an op keeps alive what its args point to.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from kernels.native.build import BuildError, library_path, machine_levels, processor
from kernels.native.config import LEVEL_VARIABLE, child_environment, forced_level
from kernels.native.mirror import structure

_log = logging.getLogger(__name__)

# Levels whose instructions need the system's consent, and the module that tries them out.
CHECKED_LEVELS = frozenset({"amx"})
SELF_CHECK = "kernels.linear.self_check"
SELF_CHECK_LIMIT_S = 120.0


class NativeUnavailableError(Exception):
    """There is no native library for this machine; the message says why."""


class UnknownLevelError(NativeUnavailableError):
    """The environment asks for a level that this machine does not have; the message names those it has."""


StepStruct = structure("Step")
OpStruct = structure("Op")


class Op:
    """One operation with its args. `keep` holds what the args point to."""

    def __init__(self, library: NativeLibrary, name: str, args: ctypes.Structure, *keep: object) -> None:
        self.name = name
        self.function = library.op_address(name, ctypes.sizeof(args))
        self.args = args
        self.keep = keep


class Program:
    """Ops in the order in which they run."""

    def __init__(self, library: NativeLibrary, ops: Sequence[Op]) -> None:
        self._library = library
        self.ops = list(ops)
        self._array = (OpStruct * len(ops))(*[OpStruct(op.function, ctypes.addressof(op.args)) for op in ops])

    def run(self, pool: int) -> None:
        """Runs all ops; the interpreter's lock is free meanwhile."""
        self._library.run_pool(pool, self._array, len(self.ops), None)

    def run_timed(self, pool: int) -> list[float]:
        """Runs all ops and says how many seconds each took."""
        spent = (c_int64 * len(self.ops))()
        self._library.run_pool(pool, self._array, len(self.ops), spent)
        return [nanoseconds * 1e-9 for nanoseconds in spent]


class NativeLibrary:
    """The functions of one level's library."""

    def __init__(self, level: str, path: Path) -> None:
        self.level = level
        self.path = path
        self._handle = ctypes.CDLL(str(path))
        self._create = self._handle.millrace_pool_create
        self._create.restype, self._create.argtypes = c_void_p, (c_int64, c_int64)
        self._wake = self._handle.millrace_pool_wake
        self._wake.restype, self._wake.argtypes = None, (c_void_p,)
        self._run = self._handle.millrace_pool_run
        self._run.restype, self._run.argtypes = None, (c_void_p, c_void_p, c_int64, c_void_p)
        self._pools: dict[int, int] = {}
        # Threads of what belongs to no model, 0 is one per CPU; set by who serves.
        self.usual_threads = 0

    def num_threads(self, wanted: int = 0) -> int:
        """Threads of the pool for a wish: 0 is one per CPU that the process may use."""
        return wanted or len(os.sched_getaffinity(0))

    def pool(self, num_threads: int = 0) -> int:
        """The pool of so many threads, made when first asked for.

        With one thread per CPU they are bound to theirs; with fewer, other processes may need the choice.
        """
        count = self.num_threads(num_threads)
        if count not in self._pools:
            self._pools[count] = self._create(count, int(count == self.num_threads()))
        return self._pools[count]

    def wake(self, pool: int) -> None:
        """Wakes a pool's threads ahead of a run that follows shortly."""
        self._wake(pool)

    def run_pool(
        self, pool: int, ops: ctypes.Array[Any], count: int, spent: ctypes.Array[c_int64] | None
    ) -> None:
        """Runs `count` ops; adds each one's nanoseconds to `spent`."""
        self._run(pool, ops, count, spent)

    def run(self, ops: Sequence[Op], *, num_threads: int = 1) -> None:
        """Runs ops once, one after another: for tests and for products outside a program."""
        Program(self, ops).run(self.pool(num_threads))

    def op_address(self, name: str, args_size: int) -> int:
        """Address of an op whose args have the given size in bytes."""
        expected = self.function(f"{name}_args_size")()
        assert expected == args_size, f"{name}: args have {args_size} bytes here and {expected} in C++"
        return ctypes.cast(getattr(self._handle, name), c_void_p).value or 0

    def function(self, name: str, restype: type | None = c_int64, argtypes: Sequence[type] = ()) -> Any:
        """An exported function that is no op."""
        found: Any = getattr(self._handle, name)
        found.restype, found.argtypes = restype, tuple(argtypes)
        return found


def open_level(level: str) -> NativeLibrary:
    """The library of one level, built if need be, without any check. Raises NativeUnavailableError."""
    try:
        library = NativeLibrary(level, library_path(level))
    except (BuildError, OSError) as error:
        raise NativeUnavailableError(str(error)) from error
    if library.function("millrace_prepare")():
        raise NativeUnavailableError(f"the system does not let this process use {level}")
    return library


@cache
def load_level(level: str) -> NativeLibrary:
    """The library of one level that the machine has. Raises NativeUnavailableError when it does not work."""
    if level in CHECKED_LEVELS:
        _check(level)
    return open_level(level)


def _check(level: str) -> None:
    """Runs the level in a child process first, once per library and kind of machine."""
    try:
        path = library_path(level)
    except BuildError as error:
        raise NativeUnavailableError(str(error)) from error
    machine = hashlib.sha256(f"{platform.release()} {processor()}".encode()).hexdigest()[:12]
    passed = path.with_name(f"{path.stem}-{machine}.passed")
    if passed.exists():
        return
    command = [sys.executable, "-m", SELF_CHECK, level]
    try:
        result = subprocess.run(
            command,
            env=child_environment(),
            capture_output=True,
            text=True,
            timeout=SELF_CHECK_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailableError(f"the self-check of {level} did not end") from error
    if result.returncode:
        said = (result.stdout + result.stderr).strip().splitlines()[-1:] or ["it said nothing"]
        raise NativeUnavailableError(f"the self-check of {level} failed ({result.returncode}): {said[0]}")
    with contextlib.suppress(OSError):
        passed.touch()


def load_native() -> NativeLibrary:
    """The best library that works here. Raises NativeUnavailableError saying why there is none."""
    found = _found()
    if isinstance(found, NativeUnavailableError):
        raise found.with_traceback(None)
    return found


@cache
def _found() -> NativeLibrary | NativeUnavailableError:
    """The best library, or why there is none: a build that fails is not tried again, as the next who asks may
    be a step that others wait for.
    """
    try:
        return best_library()
    except NativeUnavailableError as error:
        return error


def likely_level() -> str | None:
    """The level that this process computes with where its library can be had; None where there is none."""
    levels = machine_levels()
    return forced_level() or (levels[-1] if levels else None)


def best_library() -> NativeLibrary:
    """As `load_native`, tried anew."""
    levels = machine_levels()
    if not levels:
        raise NativeUnavailableError("the processor has no AVX2, or this is not Linux on x86-64")
    forced = forced_level()
    if forced:
        if forced not in levels:
            known = ", ".join(levels)
            raise UnknownLevelError(
                f"{LEVEL_VARIABLE} = {forced!r}: this machine has the levels {known}; name one of them, "
                "or unset the variable to compute with the best"
            )
        return load_level(forced)
    for level in reversed(levels[1:]):
        try:
            return load_level(level)
        except NativeUnavailableError as error:
            _log.warning("native kernels: %s is not used: %s", level, error)
    return load_level(levels[0])
