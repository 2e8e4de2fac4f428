"""Memory of a service that has started: what is loaded stays, and is kept where it costs least.

A request visits a dozen megabytes of objects in each process, after others had the processor. On pages of
2 MB they take one entry of its address cache where they took five hundred. And Python looks through all
objects for those in cycles whenever there are 700 more than the last time; all others need nobody who looks.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path

# New objects after which the young generation is collected. That takes a millisecond, for which every stream
# waits. 256 requests that begin have 30,000 objects.
_YOUNG = 2_000
# Collections of the young generation before the middle one is collected as a whole, which takes longer the
# more requests there are, and finds nothing, because requests leave no cycles behind.
_OLDER = 1_000
# Collections of the middle generation before everything is collected.
_OLDEST = 20

# Delay of `GiveBack`, in seconds.
GIVE_BACK_AFTER_S = 1.0

_HUGE = 2 * 1024 * 1024
_PAGE = 4096
_MADV_COLLAPSE = 25
# Larger areas are no interpreter's: weights, caches of keys and values.
_MAX_AREA = 64 * 1024 * 1024
_MAX_BYTES = 128 * 1024 * 1024
_MAPS = Path("/proc/self/maps")
# Options of glibc's mallopt.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
# Requests that are no attack have fewer bytes, and their pieces come and go without a call of the kernel.
_LARGE_PIECE = 1 << 20
# The largest value that glibc takes for the mmap threshold on 64-bit machines.
_MMAP_THRESHOLD_BYTES = 32 << 20


def settle() -> None:
    """To be called once, when everything is loaded that stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _OLDER, _OLDEST)
    give_back()
    use_huge_pages()


def give_back() -> None:
    """What was freed goes back to the system: loading takes more for a moment than what it leaves, and glibc
    keeps it (parsed files, weights before they were packed). Other allocators do so by themselves.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class GiveBack:
    """Gives back what large requests leave, in another thread and a while after they have ended: pages that
    are wanted again soon are kept. Use from one event loop.
    """

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        """Something large was freed."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GIVE_BACK_AFTER_S, self._now)

    def _now(self) -> None:
        self._timer = None
        # It takes milliseconds where much is free, with the lock of an interpreter that others could use.
        asyncio.get_running_loop().run_in_executor(None, give_back)


def keep_freed_memory(most_bytes: int = 512 << 20) -> None:
    """Freed memory stays in the process, up to so much, as it is wanted again soon: glibc returns large freed
    pieces to the kernel, which then zeroes fresh pages; on a CPU that costs an engine more than its steps'
    arithmetic (bundled model, 32 decoding sequences: 78 ms per step so, 33 ms with this). Call before the
    first large allocation; does nothing where there is no glibc.
    """
    _mallopt(_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    _mallopt(_TRIM_THRESHOLD, most_bytes)


def return_large_pieces() -> None:
    """What has megabytes goes back to the kernel when it is freed. glibc would keep the next ones in its heap
    once such a piece was freed, where what lies behind them pins them down.
    """
    _mallopt(_MMAP_THRESHOLD, _LARGE_PIECE)


def one_heap() -> None:
    """Threads get no memory of their own from glibc's malloc: the main one goes on with what they have used,
    and none of the address space is set aside for them.
    """
    _mallopt(_ARENA_MAX, 1)


def _mallopt(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)


def use_huge_pages() -> None:
    """Moves what is at least half used to pages of 2 MB. Where the kernel has none, nothing changes."""
    libc = ctypes.CDLL(None)
    if not (_MAPS.exists() and hasattr(libc, "madvise") and hasattr(libc, "mincore")):
        return
    present = (ctypes.c_ubyte * (_HUGE // _PAGE))()
    size = ctypes.c_size_t(_HUGE)
    moved = 0
    for start in _blocks():
        address = ctypes.c_void_p(start)
        if libc.mincore(address, size, present) or sum(present) * 2 < len(present):
            continue
        # Kernels before 6.1 do not know the request.
        moved += _HUGE * (libc.madvise(address, size, _MADV_COLLAPSE) == 0)
        if moved >= _MAX_BYTES:
            return


def _blocks() -> Iterator[int]:
    """Addresses of 2 MB each of the process's own memory, that of files and of its main stack left out."""
    for line in _MAPS.read_text().splitlines():
        area, mode, _, _, inode, *name = line.split(maxsplit=5)
        start, end = (int(each, 16) for each in area.split("-"))
        if mode != "rw-p" or inode != "0" or name not in ([], ["[heap]"]) or end - start > _MAX_AREA:
            continue
        yield from range(-(-start // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE)
