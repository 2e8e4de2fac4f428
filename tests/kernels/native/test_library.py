"""Building, loading and the pool of threads."""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import subprocess
import sys
import tempfile
import time
from ctypes import c_int64, c_void_p
from functools import cache
from pathlib import Path

import pytest
import torch

from kernels.embedding.native import TABLE_TYPES, EmbeddingArgs
from kernels.native import build, library
from kernels.native.library import NativeLibrary, NativeUnavailableError, Op, StepStruct, UnknownLevelError
from tests.kernels.native.conftest import LEVELS


@pytest.mark.parametrize("name", TABLE_TYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_an_op_runs_on_all_threads(native: NativeLibrary, name: str, num_threads: int) -> None:
    table = torch.randn(50, 33).to(getattr(torch, name))
    for count in (1, 2, 7, 64):
        ids = torch.randint(0, 50, (count,))
        step = StepStruct(num_tokens=count, token_ids=ids.data_ptr())
        out = torch.full((count, 33), float("nan"))
        args = EmbeddingArgs(
            ctypes.addressof(step), table.data_ptr(), out.data_ptr(), 33, TABLE_TYPES[name], 2.0
        )
        native.run([Op(native, "embedding", args)] * 5, num_threads=num_threads)
        assert torch.equal(out, table[ids].float() * 2)


# Of one level: how threads wait is the same code in all.
@pytest.mark.parametrize("native", (LEVELS or ["none"])[-1:], indirect=True)
def test_no_wake_up_is_lost(native: NativeLibrary) -> None:
    """A thread that is woken while it lies down gets up again: else it would sleep for good, and the others
    would do its work from then on.
    """
    before = set(os.listdir("/proc/self/task"))
    create = native.function("millrace_pool_create", c_void_p, (c_int64, c_int64))
    pool = create(2, 0)
    (worker,) = set(os.listdir("/proc/self/task")) - before
    # It lies down about 0.2 ms after it has got up; the moment that counts is shorter than a microsecond.
    for _ in range(8000):
        until = time.perf_counter() + random.uniform(0.1e-3, 0.3e-3)
        while time.perf_counter() < until:
            pass
        native.wake(pool)
    lain_down = _times_lain_down(worker)
    # A thread that sleeps for good lets the test run into its time limit.
    while _times_lain_down(worker) == lain_down:
        time.sleep(0.001)
        native.wake(pool)


def _times_lain_down(thread: str) -> int:
    for line in Path(f"/proc/self/task/{thread}/status").read_text().splitlines():
        if line.startswith("voluntary_ctxt_switches"):
            return int(line.split()[1])
    raise AssertionError("no count of switches")


def test_args_of_another_size_are_refused(native: NativeLibrary) -> None:
    size = ctypes.sizeof(StepStruct)
    with pytest.raises(AssertionError, match=f"embedding: args have {size} bytes here and"):
        Op(native, "embedding", StepStruct())


@pytest.mark.parametrize(
    ("vendor", "levels"),
    [
        ("AuthenticAMD", ["avx2", "avx512", "avx512_bf16"]),
        ("GenuineIntel", ["avx2", "avx512_bf16", "avx512"]),
    ],
)
def test_the_best_level_depends_on_who_made_the_processor(
    vendor: str, levels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Intel's bfloat16 dot product is half as fast as its float32 products, these as those of float16."""
    flags = " ".join(sorted(build.LEVELS["avx512_bf16"].needs | build.LEVELS["avx2"].needs))
    monkeypatch.setattr(build, "processor", lambda: f"vendor_id\t: {vendor}\nflags\t\t: fpu {flags}")
    assert build.machine_levels() == levels
    halves = "avx512_fp16"
    wide = " ".join(build.LEVELS[halves].needs)
    monkeypatch.setattr(build, "processor", lambda: f"vendor_id\t: {vendor}\nflags\t\t: {flags} {wide}")
    assert build.machine_levels()[-1] == (halves if vendor == "GenuineIntel" else "avx512_bf16")
    tiles = " ".join(build.LEVELS["amx"].needs)
    monkeypatch.setattr(build, "processor", lambda: f"vendor_id\t: {vendor}\nflags\t\t: {flags} {tiles}")
    assert build.machine_levels() == [*levels, "amx"]


def test_a_laptop_without_avx512_multiplies_bytes_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = " ".join(build.LEVELS["avx2_vnni"].needs)
    monkeypatch.setattr(build, "processor", lambda: f"vendor_id\t: GenuineIntel\nflags\t\t: fpu {flags}")
    assert build.machine_levels() == ["avx2", "avx2_vnni"]


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """One that takes no time: it links what was built of the same sources, and notes that it was asked to."""
    try:
        built = build.library_path("avx2")
    except build.BuildError as error:
        pytest.skip(f"no native library: {error}")
    script = tmp_path / "compiler"
    script.write_text(
        '#!/bin/sh\nfor out in "$@"; do :; done\ncase " $* " in\n'
        f'*" -shared "*) echo linked >>{tmp_path}/compiler.log; exec cp {built} "$out";;\n'
        '*" -c "*) : >"$out";;\nesac\n'
    )
    script.chmod(0o755)
    return script


def with_compiler(compiler: Path, cache: Path) -> dict[str, str]:
    """The environment of a process that builds with it, into a cache of its own."""
    variables = {"NATIVE_KERNELS_CACHE": str(cache), "NATIVE_KERNELS_LEVEL": "avx2", "CXX": str(compiler)}
    return {**os.environ, **variables}


def num_built(compiler: Path) -> int:
    return len(compiler.with_name("compiler.log").read_text().splitlines())


def test_several_processes_build_at_once(compiler: Path, tmp_path: Path) -> None:
    code = "from kernels.native.library import load_native; print(load_native().path)"
    folder = tmp_path / "cache"
    environment = with_compiler(compiler, folder)
    command = [sys.executable, "-c", code]
    found = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {process.communicate()[0].strip() for process in found}
    assert len(paths) == 1
    assert [path.name for path in folder.glob("*.so")] == [Path(next(iter(paths))).name]
    # The others waited for the one that did.
    assert num_built(compiler) == 1
    # Without a compiler, what was built serves.
    without = subprocess.run(
        command, env={**environment, "PATH": "", "CXX": ""}, capture_output=True, text=True, check=True
    )
    assert without.stdout.strip() in paths


def test_no_compiler_is_said(tmp_path: Path) -> None:
    code = (
        "from kernels.native.library import *\ntry:\n    load_native()\n"
        "except NativeUnavailableError as error:\n    print(error)"
    )
    environment = {**os.environ, "NATIVE_KERNELS_CACHE": str(tmp_path), "PATH": "", "CXX": ""}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "no C++ compiler (g++ or clang++) is installed"


def test_what_failed_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the sampler in its first step, for instance: each try may be a build that takes a minute to fail."""
    tries: list[str] = []

    def fails(level: str) -> NativeLibrary:
        tries.append(level)
        raise NativeUnavailableError("the compiler ran out of disk space")

    monkeypatch.setattr(library, "machine_levels", lambda: ["avx2"])
    monkeypatch.setattr(library, "forced_level", lambda: "")
    monkeypatch.setattr(library, "load_level", fails)
    monkeypatch.setattr(library, "_found", cache(library._found.__wrapped__))
    for _ in range(3):
        with pytest.raises(NativeUnavailableError, match="ran out of disk space"):
            library.load_native()
    assert tries == ["avx2"]


def test_a_level_that_the_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "machine_levels", lambda: ["avx2", "avx512"])
    monkeypatch.setenv("NATIVE_KERNELS_LEVEL", "amx")
    monkeypatch.setattr(library, "_found", cache(library._found.__wrapped__))
    said = "NATIVE_KERNELS_LEVEL = 'amx': this machine has the levels avx2, avx512; name one of them"
    for _ in range(2):
        with pytest.raises(UnknownLevelError, match=said):
            library.load_native()


@pytest.mark.parametrize("has_library", [True, False])
def test_a_cache_that_cannot_be_written(
    has_library: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another compiler's library of the same sources serves; one of other sources does not keep from building
    elsewhere.
    """
    cache = tmp_path / "cache"
    cache.mkdir()
    there = cache / f"avx2-{build._source_hash('avx2') if has_library else 'older'}-other.so"
    there.touch()
    there.with_suffix(".sha256").write_text(hashlib.sha256(b"").hexdigest())
    monkeypatch.setenv("NATIVE_KERNELS_CACHE", str(cache))
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(build, "_compile", lambda compiler, level, target: target.touch())
    # The tests may run as root, for whom every folder is writable.
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != cache and access(path, mode))
    found = build.library_path("avx2")
    assert (found == there) == has_library
    assert found.parent == (cache if has_library else tmp_path / f"millrace-native-{os.getuid()}")
    assert {path.name for path in cache.iterdir()} == {there.name, there.with_suffix(".sha256").name}


def test_a_library_that_is_not_whole_is_built_anew(compiler: Path, tmp_path: Path) -> None:
    """Loading it would end the process, even where its head is in order."""
    code = "from kernels.native.library import load_native; print(load_native().path)"
    folder = tmp_path / "cache"
    environment = with_compiler(compiler, folder)

    def load(**changes: str) -> Path:
        command = [sys.executable, "-c", code]
        result = subprocess.run(
            command, env={**environment, **changes}, capture_output=True, text=True, check=True
        )
        return Path(result.stdout.strip())

    path = load()
    whole = path.read_bytes()
    old = folder / "avx2-older-compiler.so"
    passed = folder / "avx2-older-compiler-machine.passed"
    kept = folder / "avx2-other-compiler.so"
    for other in (old, passed, kept):
        other.touch()
    long_ago = time.time() - (build.KEPT_DAYS + 1) * 86_400
    os.utime(old, (long_ago, long_ago))
    path.write_bytes(whole[: len(whole) // 2])
    assert load() == path
    assert path.read_bytes() == whole
    assert num_built(compiler) == 2
    assert not old.exists()
    assert not passed.exists()
    assert kept.exists()
    # Without a compiler there is nothing to be done but to say so.
    path.write_bytes(whole[:-1])
    without = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PATH": "", "CXX": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "no C++ compiler (g++ or clang++) is installed" in without.stderr
    assert without.returncode == 1
