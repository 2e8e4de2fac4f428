"""Blocks that are held for another engine, under tickets, beyond the end of the request that computed them.

Used by KvCache, whose scheduler says when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.kv.block_pool import BlockPool

# Part of the blocks that may be held at a time.
MAX_SHARE = 0.5


class Pins:
    """References that tickets have. Each is for a bounded time, and all of them for a bounded share."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        # Ticket to blocks, and to the moment at which it ends; in the order in which they end.
        self._held: dict[bytes, tuple[int, ...]] = {}
        self._until_s: dict[bytes, float] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks that are held, those under several tickets once for each."""
        return sum(map(len, self._held.values()))

    @property
    def references(self) -> Counter[int]:
        """References to each block."""
        return Counter(block_id for held in self._held.values() for block_id in held)

    def hold(self, ticket: bytes, block_ids: Sequence[int], until_s: float) -> bool:
        """Whether the blocks, which are referenced, are held from now on: not where the ticket is in use, or
        too much is.
        """
        if ticket in self._held or self.num_blocks + len(block_ids) > MAX_SHARE * self._pool.num_present:
            return False
        for block_id in block_ids:
            self._pool.reference(block_id)
        self._held[ticket], self._until_s[ticket] = tuple(block_ids), until_s
        return True

    def release(self, ticket: bytes) -> bool:
        """Lets go what is held under a ticket; False where nothing is. May be called again."""
        held = self._held.pop(ticket, None)
        if held is None:
            return False
        del self._until_s[ticket]
        self._pool.release(reversed(held))
        return True

    def next_end_s(self) -> float | None:
        """When the first of them ends by itself."""
        return min(self._until_s.values(), default=None)

    def ended(self, now: float) -> list[bytes]:
        """Tickets whose time is over."""
        return [ticket for ticket, until_s in self._until_s.items() if until_s <= now]

    @property
    def tickets(self) -> tuple[bytes, ...]:
        """All of them."""
        return tuple(self._held)
