"""How a cache's memory is divided between blocks and window blocks, and how that follows the load.

Each kind has more ids than there is memory for. What one lacks and the other does not need goes from here to
there: ids are retired, whose memory the runner gives back, and others come into use.
"""

from __future__ import annotations

from operator import mul

import msgspec

from engine.kv.block_pool import BlockPool
from engine.kv.window_pool import WindowPool


class Division(msgspec.Struct, frozen=True, kw_only=True):
    """How a cache is divided at first between blocks and window blocks, and what one of each takes."""

    num_blocks: int
    num_window_blocks: int
    block_bytes: int
    window_block_bytes: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of a block and of a window block."""
        return self.block_bytes, self.window_block_bytes


class SharedMemory:
    """Of the two pools of one cache. Without a `division` each keeps what it has."""

    def __init__(self, blocks: BlockPool, windows: WindowPool, division: Division | None) -> None:
        self._pools: tuple[BlockPool | WindowPool, BlockPool | WindowPool] = (blocks, windows)
        self._division = division
        # Bytes that neither kind has, fewer than a block takes; and what the runner has yet to hear: blocks,
        # and window blocks, whose memory goes.
        self._spare_bytes = 0
        self._retired: tuple[dict[int, None], dict[int, None]] = ({}, {})

    def make_room(self, num_blocks: int, num_window_blocks: int) -> bool:
        """Whether so many of both kinds can be had now. Memory that one kind does not need for it goes to the
        other.
        """
        lacking = (
            num_blocks - self._pools[0].num_available,
            num_window_blocks - self._pools[1].num_available,
        )
        if max(lacking) <= 0:
            return True
        if self._division is None or min(lacking) > 0:
            return False
        taker = int(lacking[1] > 0)
        return self._shift(1 - taker, -lacking[1 - taker], lacking[taker], self._division.sizes)

    def covers(self, there: tuple[int, int], needed: tuple[int, int]) -> bool:
        """Whether so many blocks and window blocks that are there cover those that are needed."""
        if self._division is None:
            return needed[0] <= there[0] and needed[1] <= there[1]
        sizes = self._division.sizes
        return bool(sum(map(mul, needed, sizes)) <= sum(map(mul, there, sizes)) + self._spare_bytes)

    def _shift(self, giver: int, most: int, lacking: int, sizes: tuple[int, int]) -> bool:
        """Lets the kind `giver` give at most so many for as many of the other as are lacking."""
        taker, pools = 1 - giver, self._pools
        count = max(0, -(-(lacking * sizes[taker] - self._spare_bytes) // sizes[giver]))
        if count > most or lacking > pools[taker].num_absent:
            return False
        for block_id in pools[giver].retire(count):
            self._retired[giver][block_id] = None
        self._spare_bytes += count * sizes[giver]
        taken = min(pools[taker].num_absent, self._spare_bytes // sizes[taker])
        for block_id in pools[taker].restore(taken):
            self._retired[taker].pop(block_id, None)
        self._spare_bytes -= taken * sizes[taker]
        return True

    def drain_retired(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Blocks, and window blocks, whose memory goes with the plan under construction."""
        found = tuple(self._retired[0]), tuple(self._retired[1])
        self._retired = ({}, {})
        return found

    def check_invariants(self) -> None:
        """Raises AssertionError unless what is there takes the bytes that were there at first."""
        if self._division is None:
            return
        division, there = self._division, tuple(pool.num_present for pool in self._pools)
        first = division.num_blocks, division.num_window_blocks
        assert sum(map(mul, there, division.sizes)) + self._spare_bytes == sum(
            map(mul, first, division.sizes)
        ), "memory went from one kind of blocks to the other, and some is lost or there twice"
