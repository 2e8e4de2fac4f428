"""What comes from disk into a cache: blocks, and a slot of a state, that nobody finds or uses before they are
filled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from contract.prefix import BlockHash
from engine.kv.block_pool import BlockPool
from engine.kv.disk import BlockDisk, DiskRead, state_name
from engine.kv.state_pool import StatePool


class DiskReads:
    """Of one cache. `offers` is told a block, its content and the content before it, once it is filled;
    `is_there` says whether the cache has the content of a block.
    """

    def __init__(
        self,
        disk: BlockDisk | None,
        pool: BlockPool,
        states: StatePool | None,
        *,
        offers: Callable[[int, BlockHash, BlockHash | None], None],
        is_there: Callable[[BlockHash], bool],
    ) -> None:
        self._disk = disk
        self._pool = pool
        self._states = states
        self._offers = offers
        self._is_there = is_there
        # Set apart now.
        self.block_ids: set[int] = set()
        self.state_slots: set[int] = set()

    def num_worth_it(self, hashes: Sequence[BlockHash]) -> int:
        """How many of these contents, which follow what can be used now, can be used once what is on disk is
        read: with layers that carry a state, those up to the last state that is there.
        """
        if self._disk is None:
            return 0
        if self._states is None:
            return self._disk.num_leading(hashes)
        found = len(self._pool.lookup_leading(hashes))
        found += self._disk.num_leading(hashes[found:])
        while found and hashes[found - 1] not in self._states:
            if self._disk.num_leading((state_name(hashes[found - 1]),)):
                break
            found -= 1
        return found

    def begin(
        self, token: int, hashes: Sequence[BlockHash], parent: BlockHash | None, after_step_id: int
    ) -> DiskRead | None:
        """Sets apart what contents that are not there take, `parent` before the first: blocks, and a slot
        for the state behind the last. None while too many slots are set apart.

        The caller has checked that so many blocks are available.
        """
        state_hash, slot = None, -1
        if self._states is not None:
            # These are evicted last.
            there = self._pool.lookup_leading(hashes)
            self._pool.use(there)
            state_hash = None if hashes[-1] in self._states else hashes[-1]
            parent = hashes[len(there) - 1] if there else parent
            hashes = hashes[len(there) :]
        if self._states is not None and state_hash is not None:
            found = self._states.take_for_copy()
            if found is None:
                return None
            slot = found
            self.state_slots.add(slot)
        block_ids = tuple(self._pool.allocate() for _ in hashes)
        self.block_ids.update(block_ids)
        return DiskRead(token, tuple(hashes), block_ids, parent, state_hash, slot, after_step_id)

    def end(self, read: DiskRead, num_filled: int) -> None:
        """The first so many of what was wanted have their contents, and can be found; all are given back."""
        has_state = read.state_hash is not None and num_filled > 0
        num_filled -= has_state
        parent = read.parent
        for block_id, block_hash in zip(read.block_ids[:num_filled], read.hashes, strict=False):
            self._offers(block_id, block_hash, parent)
            parent = block_hash
        self.block_ids.difference_update(read.block_ids)
        self._pool.release(reversed(read.block_ids))
        if self._states is None or read.state_hash is None:
            return
        self.state_slots.remove(read.state_slot)
        if has_state and self._is_there(read.state_hash):
            self._states.keep(read.state_slot, read.state_hash)
        else:
            self._states.drop_copy(read.state_slot)
