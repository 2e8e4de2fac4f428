"""The prefix blocks that the engine holds, as its KV events told: late gateways hear of them all.

Kept in the front, so that a snapshot costs the core nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.types import BlocksStored, KvEvent

# Hashes in one event of a snapshot, and in all of it.
_HASHES_PER_EVENT = 4096
_MAX_HASHES = 262_144


class HeldBlocks:
    """Hashes of stored blocks with their parents, in the order in which they were stored."""

    def __init__(self, max_hashes: int = _MAX_HASHES) -> None:
        self._max_hashes = max_hashes
        self._parents: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._parents)

    def apply(self, events: Iterable[KvEvent]) -> None:
        """Takes changes in their order."""
        for event in events:
            if isinstance(event, BlocksStored):
                parent = event.parent_hash
                for block_hash in event.block_hashes:
                    self._parents[block_hash] = parent
                    parent = block_hash
            else:
                for block_hash in event.block_hashes:
                    self._parents.pop(block_hash, None)

    def snapshot(self) -> Iterator[BlocksStored]:
        """What is held as stored events, one per run of blocks. Beyond the limit the youngest are left out:
        a block is stored after the one before it, so whole prefixes remain.
        """
        run: list[int] = []
        run_parent = 0
        for number, (block_hash, parent) in enumerate(self._parents.items()):
            if number == self._max_hashes:
                break
            if run and (parent != run[-1] or len(run) == _HASHES_PER_EVENT):
                yield BlocksStored(tuple(run), run_parent)
                run = []
            if not run:
                run_parent = parent
            run.append(block_hash)
        if run:
            yield BlocksStored(tuple(run), run_parent)
