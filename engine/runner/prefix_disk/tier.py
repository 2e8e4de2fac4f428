"""The disk behind the prefix cache, as the scheduler sees it: two threads move blocks, and states, beside the
steps.

Written: every full block that was computed, from where it lies in the cache. The scheduler says when a block
is about to be given away; what was read of it by then counts, what was read meanwhile is thrown away, so
that no step waits for a write, and none copies anything for it. Read: into blocks that nobody else holds.

Guarantees
- No method waits for a disk, `close` excepted.
- An entry is written only if its block held this content from the first to the last byte that was read.
- What fails (a full disk, a damaged entry) is counted, and costs what would be computed anyway.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from engine.runner.prefix_disk.blocks import BlockBytes
from engine.runner.prefix_disk.entries import EntryDamaged, EntryFiles
from engine.types import DiskCounters

_log = logging.getLogger(__name__)

# Entries of other engines are looked for this often, and all are counted this often, in seconds.
_LOOK_S = 1.0
_COUNT_S = 60.0
# Nothing is written for so long after a write has failed, in seconds.
_PAUSE_S = 10.0
# What is still to be written when the engine ends has so long, in seconds.
_END_S = 5.0


class DiskTier:
    """One engine's blocks on disk. Its methods are called in one thread; the work is done in two others."""

    def __init__(
        self, files: EntryFiles, blocks: Callable[[], BlockBytes], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`blocks` makes what reads and writes the cache's blocks, one for each thread."""
        self._files = files
        self._clock = clock
        self._changed = threading.Condition()
        # Blocks to write, with their content: those not begun, and the one that is being read.
        self._waiting: OrderedDict[int, bytes] = OrderedDict()
        self._writing: int | None = None
        self._used: deque[Sequence[bytes]] = deque()
        self._asked: deque[tuple[int, Sequence[tuple[bytes, int]]]] = deque()
        self._finished: deque[tuple[int, int]] = deque()
        self._closing = False
        self._paused_until_s = 0.0
        self._counters = DiskCounters()
        files.look()
        self._threads = [
            threading.Thread(target=work, args=(blocks(),), name=name, daemon=True)
            for name, work in (("prefix-write", self._write_all), ("prefix-read", self._read_all))
        ]
        for thread in self._threads:
            thread.start()

    def num_leading(self, hashes: Iterable[bytes]) -> int:
        """How many of the first contents are on disk, as far as is known."""
        return self._files.num_leading(hashes)

    def write_later(self, block_id: int, block_hash: bytes) -> None:
        """The block holds this content until `forget`."""
        with self._changed:
            self._waiting[block_id] = block_hash
            self._changed.notify_all()

    def forget(self, block_id: int) -> None:
        """The block is about to get other content."""
        with self._changed:
            is_lost = self._waiting.pop(block_id, None) is not None
            if self._writing == block_id:
                self._writing, is_lost = None, True
            self._counters.num_dropped += is_lost

    def forget_all(self) -> None:
        """What blocks hold is in doubt."""
        with self._changed:
            self._counters.num_dropped += len(self._waiting) + (self._writing is not None)
            self._waiting.clear()
            self._writing = None

    def use(self, hashes: Sequence[bytes]) -> None:
        """Somebody asked for these contents."""
        if hashes:
            with self._changed:
                self._used.append(hashes)
                self._changed.notify_all()

    def read_later(self, token: int, blocks: Sequence[tuple[bytes, int]]) -> None:
        """Begins to read contents into blocks that nobody reads or writes until `finished` has the token."""
        with self._changed:
            self._asked.append((token, blocks))
            self._changed.notify_all()

    def finished(self) -> list[tuple[int, int]]:
        """Tokens of what is read since the last call, each with how many of its first blocks are filled."""
        found = []
        while self._finished:
            found.append(self._finished.popleft())
        return found

    def counters(self) -> DiskCounters:
        """What happened since the start."""
        self._counters.num_bytes = self._files.num_bytes
        return self._counters

    def close(self) -> None:
        """Ends the threads, when what waits is written or the time for that is over."""
        with self._changed:
            self._closing = True
            self._asked.clear()
            self._changed.notify_all()
        end_s = self._clock() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - self._clock()))
        self.forget_all()
        for thread in self._threads:
            thread.join()

    # The thread that reads.

    def _read_all(self, blocks: BlockBytes) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._closing)
                if not self._asked:
                    return
                token, wanted = self._asked.popleft()
            num_read = 0
            for block_hash, block_id in wanted:
                if self._closing or not self._read(blocks, block_hash, block_id):
                    break
                num_read += 1
            self._counters.num_read += num_read
            self._finished.append((token, num_read))

    def _read(self, blocks: BlockBytes, block_hash: bytes, block_id: int) -> bool:
        try:
            found = self._files.read(block_hash)
        except EntryDamaged as error:
            self._counters.num_damaged += 1
            _log.warning("an entry of the prefix cache on disk is damaged and was removed: %s", error)
            return False
        if found is not None:
            blocks.write(block_id, found)
        return found is not None

    # The thread that writes.

    def _write_all(self, blocks: BlockBytes) -> None:
        if hasattr(os, "SCHED_BATCH"):
            # It interrupts nobody when it wakes; a sandbox may forbid it. 0 is this thread.
            with contextlib.suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        look_due_s = count_due_s = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(self._has_writing, timeout=_LOOK_S)
                used = list(self._used)
                self._used.clear()
                writing: tuple[int, bytes] | None = None
                if self._waiting and not self._is_paused:
                    writing = self._waiting.popitem(last=False)
                    self._writing = writing[0]
                elif self._closing:
                    return
            for hashes in used:
                self._files.use(hashes)
            if writing is not None:
                self._write(blocks, *writing)
            now = self._clock()
            if now >= look_due_s:
                look_due_s = now + _LOOK_S
                self._attempt(self._files.look)
            if now >= count_due_s or self._files.num_bytes > self._files.max_bytes:
                count_due_s = now + _COUNT_S
                self._attempt(self._trim)

    @property
    def _is_paused(self) -> bool:
        return self._clock() < self._paused_until_s

    def _has_writing(self) -> bool:
        return bool(self._closing or self._used or (self._waiting and not self._is_paused))

    def _write(self, blocks: BlockBytes, block_id: int, block_hash: bytes) -> None:
        if block_hash in self._files:
            with self._changed:
                self._writing = None
            self._files.use((block_hash,))
            return
        block = blocks.read(block_id)
        with self._changed:
            is_whole = self._writing == block_id
            self._writing = None
        if is_whole and self._attempt(lambda: self._files.write(block_hash, block)):
            self._counters.num_written += 1

    def _trim(self) -> None:
        self._counters.num_evicted += self._files.trim()

    def _attempt(self, work: Callable[[], object]) -> bool:
        """Does something with files; where that fails, nothing more is tried for a while."""
        try:
            work()
        except OSError as error:
            self._counters.num_failed += 1
            self._paused_until_s = self._clock() + _PAUSE_S
            _log.warning("the prefix cache on disk pauses for %.0f s: %s", _PAUSE_S, error)
            return False
        return True
