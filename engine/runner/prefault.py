"""Memory of the cache is had from the system before a step writes there.

A page is zeroed when it is first written, and on a virtual machine the host has to find it first: 6 ms for a
huge page were measured, and the layers' pages fall due together, since every layer's cache grows by the same
blocks. A thread takes them a bounded way ahead of the blocks in use. A step that is quicker than the thread
takes its pages itself.

Shape letters: N blocks.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence

from kernels.host import Values, address_of, advise

_log = logging.getLogger(__name__)

# Linux 5.14; Python has no name for it.
_MADV_POPULATE_WRITE = 23
# Bytes of one tensor that are taken in one call: the thread holds nothing for longer than a huge page takes.
_PIECE_BYTES = 2 << 20


class Prefault:
    """Keeps `ahead_blocks` blocks beyond those in use written by the system. Ids in use grow from 0.

    `tensors` [N, ...] are contiguous, in host memory, and live as long as this.
    """

    def __init__(
        self,
        tensors: Sequence[Values],
        *,
        ahead_blocks: int,
        populate: Callable[[int, int], bool] | None = None,
    ) -> None:
        """`populate` takes an address and a size in bytes, and says whether the system knows how."""
        self._tensors = tensors
        self._num_blocks = min(tensor.shape[0] for tensor in tensors)
        self._ahead_blocks = ahead_blocks
        self._populate = populate or _populate_write
        self._changed = threading.Condition()
        self._closing = False
        self._wanted = min(self._num_blocks, ahead_blocks)
        # Blocks whose memory is there.
        self.num_blocks = 0
        self._thread = threading.Thread(target=self._work, name="prefault", daemon=True)
        self._thread.start()

    def use(self, num_blocks: int) -> None:
        """Blocks up to this number are in use."""
        wanted = min(self._num_blocks, num_blocks + self._ahead_blocks)
        if wanted > self._wanted:
            with self._changed:
                self._wanted = wanted
                self._changed.notify()

    def close(self) -> None:
        """Ends the thread; the tensors may go afterwards."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        if hasattr(os, "SCHED_BATCH"):
            # It interrupts nobody when it wakes. But its weight stays that of the others: it holds the
            # interpreter's lock now and then, and the kernel's lock of the address space in every call, and
            # with a lower priority it would hold them for seconds where other processes take all cores.
            # A sandbox may forbid it. 0 is this thread.
            with contextlib.suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        step = max(1, min(_PIECE_BYTES // max(1, tensor[0].nbytes) for tensor in self._tensors))
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._wanted > self.num_blocks)
                end = min(self._wanted, self.num_blocks + step)
            for tensor in self._tensors:
                if self._closing:
                    return
                size = tensor[0].nbytes
                begin = (address_of(tensor) + self.num_blocks * size) // mmap.PAGESIZE * mmap.PAGESIZE
                if not self._populate(begin, address_of(tensor) + end * size - begin):
                    _log.info("this system gives memory when it is first written, not before")
                    return
            self.num_blocks = end


def _populate_write(address: int, num_bytes: int) -> bool:
    return advise(address, num_bytes, _MADV_POPULATE_WRITE)
