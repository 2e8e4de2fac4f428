"""Slots for the states of sequences, in models whose layers carry one from token to token.

A slot is in exactly one of four states:
  held       a running sequence's own, which moves on with every token
  on its way a copy that a step in flight leaves at a block's end
  kept       such a copy, found by the hash of that block; least recently used makes room
  free
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from contract.prefix import BlockHash


class StatePool:
    """All slots of one engine. `num_reserved` of them are for sequences that run, however many copies."""

    def __init__(
        self,
        num_slots: int,
        num_reserved: int,
        on_loss: Callable[[int, BlockHash | None], None] = lambda slot, evicted: None,
    ) -> None:
        """`on_loss` hears of every slot whose copy is found no more, and of which block, where it only makes
        room.
        """
        self.num_slots = num_slots
        self._on_loss = on_loss
        # Copies that may be on their way at the same time.
        self._most_copies = max(0, num_slots - num_reserved)
        self._num_copies = 0
        # Taken from the end, so that low slots are used first.
        self._free = list(range(num_slots - 1, -1, -1))
        self._kept: OrderedDict[BlockHash, int] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Slots that can be taken now."""
        return len(self._free) + len(self._kept)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._kept

    def find(self, block_hash: BlockHash) -> int:
        """The copy at the end of a block that is in the pool; used most recently from now on."""
        self._kept.move_to_end(block_hash)
        return self._kept[block_hash]

    def take(self) -> int:
        """A slot with undefined content. Raises IndexError when every slot is held or on its way."""
        if self._free:
            return self._free.pop()
        if not self._kept:
            raise IndexError("no slot for a state is free")
        block_hash, slot = self._kept.popitem(last=False)
        self._on_loss(slot, block_hash)
        return slot

    @property
    def num_for_copies(self) -> int:
        """Slots that copies can be left in now."""
        return min(self._most_copies - self._num_copies, self.num_available)

    def take_for_copy(self) -> int | None:
        """A slot for a copy; None while too many are on their way."""
        if self.num_for_copies <= 0:
            return None
        self._num_copies += 1
        return self.take()

    def keep(self, slot: int, block_hash: BlockHash) -> bool:
        """A copy has arrived; it goes, and False is returned, if there is one of the same."""
        self._num_copies -= 1
        if block_hash in self._kept:
            self._kept.move_to_end(block_hash)
            self._free.append(slot)
            return False
        self._kept[block_hash] = slot
        return True

    def drop_copy(self, slot: int) -> None:
        """A copy that is on its way is not wanted any more."""
        self._num_copies -= 1
        self._free.append(slot)

    def release(self, slot: int) -> None:
        """A sequence's own slot."""
        self._free.append(slot)

    def forget(self, block_hash: BlockHash) -> None:
        """The block is lost, and without it nobody can begin behind it."""
        slot = self._kept.pop(block_hash, None)
        if slot is not None:
            self._on_loss(slot, None)
            self._free.append(slot)

    def clear(self) -> None:
        """Forgets all copies."""
        for slot in self._kept.values():
            self._on_loss(slot, None)
        self._free.extend(self._kept.values())
        self._kept.clear()

    def check_invariants(self, held: list[int], on_their_way: list[int]) -> None:
        """Raises AssertionError unless every slot is in one state; both lists come from the tables."""
        slots = [*self._free, *self._kept.values(), *held, *on_their_way]
        assert sorted(slots) == list(range(self.num_slots)), "a slot for a state is lost or has two owners"
        assert self._num_copies == len(on_their_way), "copies of states are on their way that nobody awaits"
