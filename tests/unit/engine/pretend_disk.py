"""A disk, and other engines, behind the checked runner: they take their time, lose entries, and read blocks
when they like.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import takewhile

from engine.types import DiskCounters
from engine.types.hand_over import BlockSource, HandOverCounters
from engine.types.places import slot_of
from tests.unit.engine.checked_runner import CheckedRunner

# What is kept of a block, or of a state.
Entries = dict[bytes, list[int | None]]


class PretendDisk:
    """Implements engine.kv.BlockDisk over the runner's device and states. Nothing moves before `work`."""

    def __init__(self, seed: int = 0, entries: Entries | None = None) -> None:
        self.entries: Entries = {} if entries is None else entries
        self.damaged: set[bytes] = set()
        self.num_read = 0
        self.runner: CheckedRunner | None = None
        self._random = random.Random(seed)
        self._waiting: dict[int, bytes] = {}
        self._asked: list[tuple[int, Sequence[tuple[bytes, int]]]] = []
        self._finished: list[tuple[int, int]] = []
        self._counters = DiskCounters()

    def num_leading(self, hashes: Iterable[bytes]) -> int:
        return sum(1 for _ in takewhile(self.entries.__contains__, hashes))

    def write_later(self, block_id: int, block_hash: bytes) -> None:
        self._waiting[block_id] = block_hash

    def forget(self, block_id: int) -> None:
        self._waiting.pop(block_id, None)

    def forget_all(self) -> None:
        self._waiting.clear()

    def use(self, hashes: Sequence[bytes]) -> None:
        """Nothing is removed here."""

    def read_later(self, token: int, blocks: Sequence[tuple[bytes, int]]) -> None:
        self._asked.append((token, blocks))

    def finished(self) -> list[tuple[int, int]]:
        found, self._finished = self._finished, []
        return found

    def counters(self) -> DiskCounters:
        return self._counters

    @property
    def is_idle(self) -> bool:
        return not self._asked and not self._finished

    def work(self, share: float = 1.0) -> None:
        """Does what has been asked for, each with so much probability."""
        runner = self.runner
        assert runner is not None
        for block_id, block_hash in list(self._waiting.items()):
            if self._random.random() < share:
                del self._waiting[block_id]
                is_state = block_id < 0
                self.entries[block_hash] = (
                    [runner.slots[slot_of(block_id)]] if is_state else list(runner.device[block_id])
                )
        for asked in list(self._asked):
            if self._random.random() < share:
                self._asked.remove(asked)
                self._finished.append((asked[0], self._fill(runner, asked[1])))

    def _fill(self, runner: CheckedRunner, blocks: Sequence[tuple[bytes, int]]) -> int:
        for num_filled, (block_hash, block_id) in enumerate(blocks):
            if block_hash in self.damaged:
                del self.entries[block_hash]
            if block_hash not in self.entries:
                return num_filled
            if block_id < 0:
                (runner.slots[slot_of(block_id)],) = self.entries[block_hash]  # type: ignore[assignment]
            else:
                runner.device[block_id][:] = self.entries[block_hash]
            self.num_read += 1
        return len(blocks)


class PretendPeers(PretendDisk):
    """Implements engine.kv.BlockPeers: `entries` are what other engines hold, and what this one offers."""

    receives = sends = True
    hold_s = 1.0

    def __init__(self, seed: int = 0, entries: Entries | None = None) -> None:
        super().__init__(seed, entries)
        self.offered: dict[bytes, list[tuple[bytes, int]]] = {}

    def offer(self, ticket: bytes, blocks: Sequence[tuple[bytes, int]]) -> None:
        assert ticket not in self.offered
        self.offered[ticket] = list(blocks)

    def withdraw(self, ticket: bytes) -> None:
        self.offered.pop(ticket, None)

    def pull_later(
        self, token: int, blocks: Sequence[tuple[bytes, int]], source: BlockSource, limit_s: float
    ) -> None:
        self.read_later(token, blocks)

    def stop(self, token: int) -> None:
        if any(each == token for each, _ in self._asked):
            self._asked = [asked for asked in self._asked if asked[0] != token]
            self._finished.append((token, 0))

    def counters(self) -> HandOverCounters:  # type: ignore[override]
        return HandOverCounters()

    def work(self, share: float = 1.0) -> None:
        super().work(share)
        runner = self.runner
        assert runner is not None
        for blocks in self.offered.values():
            for block_hash, block_id in blocks:
                # Held blocks keep their contents, and these are whole.
                content = list(runner.device[block_id])
                assert None not in content
                assert self.entries.setdefault(block_hash, content) == content
