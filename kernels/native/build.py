"""Compiles the C++ sources of all operations into one shared library per instruction-set level.

A library lies in a cache under a name that holds the hash of its sources and flags and of the compiler, so a
change of either makes a new one. Several processes may build at once: one compiles under a file lock, the
others wait and find it; it appears by an atomic rename. Beside it lies its digest, as loading a library that
is not whole would end the process: what does not match is made anew. Libraries that nobody has loaded for
KEPT_DAYS are deleted when another one is built. Without a compiler, a library that someone built from
the same sources serves (container images do that): `python -m kernels.native.build [--all]`, or for
another architecture `CXX=aarch64-linux-gnu-g++ python -m kernels.native.build --machine aarch64`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kernels.native.config import CACHE_VARIABLE, cache_folder, named_compiler

# Each operation's folder has its own sources; they include one another by their paths from here.
ROOT = Path(__file__).parents[1]
KEPT_DAYS = 30
_DAY_S = 86_400
# No reordering of float arithmetic and no fusing that the source does not ask for: a value must not depend on
# whether it fell into a loop's vector body or its tail.
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-pthread"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mprfchw", "-mtune=haswell")
# Processors with it and without AVX-512 are Intel's since Alder Lake.
_AVX2_VNNI = (*_AVX2[:-1], "-mavxvnni", "-mtune=alderlake")
_AVX512 = (*_AVX2[:-1], "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512cd", "-mavx512vnni")
_WIDE = ("-mprefer-vector-width=512", "-mtune=icelake-server")
_AVX2_NEEDS = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"})
_AVX512_NEEDS = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx512_vnni"})


class Level(NamedTuple):
    """An instruction-set level: the compiler's flags, and the features of a processor that it needs."""

    flags: tuple[str, ...]
    needs: frozenset[str]


# Levels of each architecture, best last (but see `machine_levels`), with features as /proc/cpuinfo names
# them.
_LEVELS_OF: dict[str, dict[str, Level]] = {
    "x86_64": {
        "avx2": Level(_AVX2, _AVX2_NEEDS),
        "avx2_vnni": Level(_AVX2_VNNI, _AVX2_NEEDS | {"avx_vnni"}),
        "avx512": Level((*_AVX512, *_WIDE), _AVX512_NEEDS),
        "avx512_fp16": Level(
            (*_AVX512, "-mavx512fp16", "-mavx512vbmi2", *_WIDE),
            _AVX512_NEEDS | {"avx512_fp16", "avx512_vbmi2"},
        ),
        "avx512_bf16": Level(
            (*_AVX512, "-mavx512bf16", "-mavx512vbmi", *_WIDE), _AVX512_NEEDS | {"avx512_bf16", "avx512vbmi"}
        ),
        "amx": Level(
            (*_AVX512, "-mavx512bf16", "-mavx512vbmi", *_WIDE, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
            _AVX512_NEEDS | {"avx512_bf16", "avx512vbmi", "amx_tile", "amx_bf16", "amx_int8"},
        ),
    },
    "aarch64": {
        "neon": Level(("-march=armv8-a",), frozenset({"asimd"})),
        "neon_dot": Level(("-march=armv8.2-a+dotprod",), frozenset({"asimd", "asimddp"})),
        "neon_bf16": Level(
            ("-march=armv8.2-a+dotprod+i8mm+bf16",), frozenset({"asimd", "asimddp", "i8mm", "bf16"})
        ),
    },
}
LEVELS = _LEVELS_OF.get(platform.machine(), {})
# Levels without the instructions that make them, for tests on processors that lack those: what the stand-in
# is made of, and its flags. Never chosen.
EMULATED = {
    "emulated_vnni": ("avx2", (*_AVX2, "-DMILLRACE_EMULATE_BYTE_DOTS")),
    "emulated_tiles": (
        "avx512_bf16",
        (*_LEVELS_OF["x86_64"]["avx512_bf16"].flags, "-DMILLRACE_EMULATE_TILES"),
    ),
}
# Bits of the auxiliary vector for features of ARM (Linux' asm/hwcap.h): entry, bit.
_AT_HWCAP, _AT_HWCAP2 = 16, 26
_ARM_BITS = {
    "asimd": (_AT_HWCAP, 1),
    "asimddp": (_AT_HWCAP, 20),
    "i8mm": (_AT_HWCAP2, 13),
    "bf16": (_AT_HWCAP2, 14),
}

_log = logging.getLogger(__name__)


class BuildError(Exception):
    """The library is not there and cannot be built; the message says why."""


def processor() -> str:
    """What /proc/cpuinfo says of the first processor's kind; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    kinds = ("vendor_id", "cpu family", "model", "stepping", "microcode", "flags", "Features", "CPU ")
    return "\n".join(line for line in lines[:40] if line.startswith(kinds))


def _features() -> set[str]:
    if platform.machine() == "aarch64" and sys.platform == "linux":
        # Not from /proc/cpuinfo, which is another processor's under emulation.
        entries = {entry: ctypes.CDLL(None).getauxval(entry) for entry in (_AT_HWCAP, _AT_HWCAP2)}
        return {name for name, (entry, bit) in _ARM_BITS.items() if entries[entry] >> bit & 1}
    line = next((line for line in processor().splitlines() if line.startswith("flags")), "")
    return set(line.partition(":")[2].split())


def machine_levels() -> list[str]:
    """Levels that this processor has, best last; none on other architectures and systems."""
    features = _features()
    levels = [name for name, level in LEVELS.items() if level.needs <= features]
    if "GenuineIntel" in processor() and "avx512_bf16" in levels:
        # Intel's vdpbf16ps multiplies 32 pairs in two cycles; float32 does 64 in them, float16 128.
        levels.insert(levels.index("avx512"), levels.pop(levels.index("avx512_bf16")))
    return levels


def library_path(level: str) -> Path:
    """The built library of a level; compiles it when it is not there. Raises BuildError."""
    name, compiler = f"{level}-{_source_hash(level)}", _compiler()
    folder = _cache_folder(name)
    if compiler is None or not os.access(folder, os.W_OK):
        found = next((path for path in sorted(folder.glob(f"{name}-*.so")) if _is_whole(path)), None)
        if found is not None:
            return found
    if compiler is None:
        raise BuildError("no C++ compiler (g++ or clang++) is installed")
    target = folder / f"{name}-{_compiler_hash(compiler)}.so"
    if not _is_whole(target):
        with _locked(target.parent):
            if not _is_whole(target):
                _compile(compiler, level, target)
                _delete_unused(target.parent)
    return target


def _digest_path(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _is_whole(library: Path) -> bool:
    """Whether a library is what was built; notes that it is in use."""
    try:
        whole = hashlib.sha256(library.read_bytes()).hexdigest() == _digest_path(library).read_text()
        if whole and time.time() - library.stat().st_mtime > _DAY_S:
            with contextlib.suppress(OSError):
                os.utime(library)
    except OSError:
        return False
    return whole


def _delete_unused(folder: Path) -> None:
    """Deletes what nobody has loaded for KEPT_DAYS, of any level and source."""
    for path in folder.glob("*.so"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > KEPT_DAYS * _DAY_S:
                for part in (path, *folder.glob(f"{path.stem}-*.passed"), _digest_path(path)):
                    part.unlink(missing_ok=True)


def _flags(level: str) -> tuple[str, ...]:
    if level in EMULATED:
        return EMULATED[level][1]
    return next(of[level] for of in _LEVELS_OF.values() if level in of).flags


def _cache_folder(name: str) -> Path:
    """Where the library of that name is or can be built; a folder of the user's own below the temporary one
    when the cache can be neither written nor has it.
    """
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK) or any(folder.glob(f"{name}-*.so"))
    except OSError:
        writable = False
    if not writable:
        folder = Path(tempfile.gettempdir()) / f"millrace-native-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise BuildError(
                f"{folder} belongs to another user; set {CACHE_VARIABLE} to a folder of your own"
            )
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise BuildError(f"{folder} cannot be written: {error.strerror}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def sources(suffix: str) -> list[Path]:
    """C++ files of every operation: `.cc` is compiled, `.h` included."""
    return sorted(ROOT.glob(f"*/*{suffix}"))


@cache
def _source_hash(level: str) -> str:
    digest = hashlib.sha256(" ".join((*FLAGS, *_flags(level))).encode())
    for path in (*sources(".cc"), *sources(".h")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _compiler() -> str | None:
    names = (named_compiler(), "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


@cache
def _compiler_hash(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    return hashlib.sha256(compiler.encode() + version).hexdigest()[:8]


def _compile(compiler: str, level: str, target: Path) -> None:
    given = sources(".cc")
    # Whoever waits for the first start sees what it waits for (`services.supervisor.process`).
    _log.info("compiling", extra={"stage": f"compiling native kernels for {level}, once"})
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = [Path(folder) / f"{source.parent.name}-{source.stem}.o" for source in given]
        compile_one = (compiler, *FLAGS, *_flags(level), "-I", str(ROOT), "-c")
        commands = [
            [*compile_one, str(source), "-o", str(made)] for source, made in zip(given, objects, strict=True)
        ]
        with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as workers:
            list(workers.map(_run, commands))
        library = Path(folder) / target.name
        _run([compiler, "-shared", "-pthread", "-Wl,-z,defs", *map(str, objects), "-o", str(library)])
        digest = library.with_suffix(".sha256")
        digest.write_text(hashlib.sha256(library.read_bytes()).hexdigest())
        # On disk before they have their names.
        for path in (library, digest):
            with path.open("rb") as written:
                os.fsync(written.fileno())
        digest.replace(_digest_path(target))
        library.replace(target)


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{command[0]} failed on {command[-3]}: {result.stderr.strip()[:4000]}")


def main() -> int:
    """Builds the libraries that this machine can use, or with --all or --machine those of every level."""
    parser = argparse.ArgumentParser(prog="python -m kernels.native.build", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every level, not only this machine's best two")
    parser.add_argument("--machine", choices=_LEVELS_OF, help="another one's; CXX names a cross compiler")
    options = parser.parse_args()
    every = _LEVELS_OF[options.machine] if options.machine else LEVELS if options.all else None
    levels = machine_levels()[-2:] if every is None else list(every)
    for level in levels:
        print(f"{level}: {library_path(level)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
