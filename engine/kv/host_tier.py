"""Host memory behind the device's prefix cache: evicted blocks are copied out and brought back on a hit.

A preempted sequence needs no path of its own: its full blocks stay in the prefix cache, move to the host when
they are evicted, and are restored when the sequence (or anyone with the same prefix) comes back.
"""

from __future__ import annotations

from collections import OrderedDict

from engine.kv.hashing import BlockHash


class HostTier:
    """Which host block holds which content. Least recently used content makes room."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[BlockHash, int] = OrderedDict()
        # Being read by the plan under construction; reusable from the next plan on.
        self._reading: list[int] = []

    def __len__(self) -> int:
        return len(self._cached)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._cached

    def begin_step(self) -> None:
        """Host blocks that the previous plan read may be overwritten from now on."""
        self._free.extend(self._reading)
        self._reading.clear()

    def store(self, block_hash: BlockHash) -> tuple[int, BlockHash | None] | None:
        """A host block to copy content into, with the content it replaces; None when nothing can be kept."""
        if block_hash in self._cached:
            self._cached.move_to_end(block_hash)
            return None
        replaced = None
        if self._free:
            host_block = self._free.pop()
        elif self._cached:
            replaced, host_block = self._cached.popitem(last=False)
        else:
            return None
        self._cached[block_hash] = host_block
        return host_block, replaced

    def take(self, block_hash: BlockHash) -> int:
        """The host block to restore from; the content leaves the tier, for the device will hold it."""
        host_block = self._cached.pop(block_hash)
        self._reading.append(host_block)
        return host_block

    def clear(self) -> list[BlockHash]:
        """Forgets all content and returns what it was."""
        dropped = list(self._cached)
        self._free.extend(self._cached.values())
        self._cached.clear()
        return dropped

    def check_invariants(self) -> None:
        """Raises AssertionError unless every host block is in exactly one place."""
        places = [*self._free, *self._cached.values(), *self._reading]
        assert sorted(places) == list(range(self.num_blocks)), "a host block is lost or in two places"
