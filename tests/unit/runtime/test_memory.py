"""Memory of a service that has started."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SETTLED = """
import gc, random
from pathlib import Path
from runtime import memory

def huge_kb():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))

def resident_kb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

kept = {number: str(number) * 3 for number in range(400_000)}
before, resident = huge_kb(), resident_kb()
memory.settle()
assert all(text == str(number) * 3 for number, text in kept.items())
assert gc.get_freeze_count() > 0
print(huge_kb() - before, resident_kb() - resident, resident)
"""


def test_what_is_loaded_lies_on_huge_pages_and_is_what_it_was() -> None:
    run = subprocess.run([sys.executable, "-c", _SETTLED], capture_output=True, text=True, check=True)
    moved_kb, more_kb, resident_kb = map(int, run.stdout.split())
    if not moved_kb:
        pytest.skip("this kernel has no huge pages to give")
    assert moved_kb > resident_kb // 4
    # Memory that is half empty stays as it is.
    assert more_kb < resident_kb // 4


def test_a_kernel_that_does_not_know_the_request_changes_nothing() -> None:
    unknown = _SETTLED.replace("memory.settle()", "memory._MADV_COLLAPSE = 9999; memory.settle()", 1)
    run = subprocess.run([sys.executable, "-c", unknown], capture_output=True, text=True, check=True)
    assert run.stdout.split()[0] == "0"


_FREED = """
import ctypes
from pathlib import Path
from runtime import memory

def resident_kb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
# Services that use large pieces again and again set this: freed pieces are kept.
libc.mallopt(-3, 32 << 20)
libc.mallopt(-1, 512 << 20)
pieces = [libc.malloc(1 << 20) for _ in range(96)]
for piece in pieces:
    ctypes.memset(piece, 1, 1 << 20)
full = resident_kb()
for piece in pieces[:-1]:
    libc.free(piece)
kept = resident_kb()
memory.settle()
print(full - kept, kept - resident_kb())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc keeps what is freed")
def test_what_loading_has_freed_goes_back_to_the_system() -> None:
    run = subprocess.run([sys.executable, "-c", _FREED], capture_output=True, text=True, check=True)
    freed_kb, given_back_kb = map(int, run.stdout.split())
    assert freed_kb < 16 * 1024, "freed memory is not kept here, so there is nothing to give back"
    assert given_back_kb > 64 * 1024


_PIECES = """
import sys
from pathlib import Path
from runtime import memory

def resident_kb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

if sys.argv[1] == "apart":
    memory.return_large_pieces()
before, kept = resident_kb(), []
for _ in range(4):
    piece = bytearray(15 << 20)
    piece[::4096] = bytes(len(piece[::4096]))
    # Lies behind it, if that is in the heap.
    kept.append(bytearray(100_000))
    del piece
print(resident_kb() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc and /proc")
def test_pieces_of_megabytes_go_back_when_they_are_freed() -> None:
    def more_kb(how: str) -> int:
        run = subprocess.run(
            [sys.executable, "-c", _PIECES, how], capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
        return int(run.stdout)

    assert more_kb("apart") < 5_000
    if more_kb("as it is") < 5_000:
        pytest.skip("this malloc returns them by itself")
