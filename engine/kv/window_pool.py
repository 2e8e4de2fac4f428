"""Room for what layers with a sliding window keep of blocks, in models whose other layers look at everything.

A block has one id for all layers. Those without a window have memory for every id. Those with one have fewer
window blocks, and a block has one of them only while a sequence may look at it through its window, or while
it is left over for prompts that begin alike. A window block is in exactly one of four states:
  held      references > 0: so many sequences have the block in their window
  kept      no references, and its block is in the prefix cache; least recently used makes room
  free
  absent    there is no memory for it now: the division of the cache between both kinds has moved
"""

from __future__ import annotations

from collections.abc import Callable

from engine.kv.block_pool import MemoryPool

Pairs = tuple[tuple[int, int], ...]
_NOWHERE = -1


class WindowPool(MemoryPool):
    """All window blocks of one engine."""

    def __init__(self, num_window_blocks: int, num_blocks: int, *, num_present: int | None = None) -> None:
        """`num_present`: those that there is memory for, where there are more ids."""
        super().__init__(num_window_blocks, num_present)
        self.num_window_blocks = num_window_blocks
        # By block.
        self._window_block_of = [_NOWHERE] * num_blocks
        self._ref_counts = [0] * num_blocks
        # What the runner has yet to hear: window blocks of blocks, and copies of what they hold.
        self._given: dict[int, int] = {}
        # Destination to source: of two copies into one window block the later one counts.
        self._copies: dict[int, int] = {}

    def __contains__(self, block_id: int) -> bool:
        """Whether the block still has what layers with a window keep."""
        return self._window_block_of[block_id] != _NOWHERE

    def ref_count(self, block_id: int) -> int:
        """Sequences that have the block in their window."""
        return self._ref_counts[block_id]

    def is_kept(self, block_id: int) -> bool:
        """Whether it has, and nobody refers to it."""
        return block_id in self._idle

    def take(self, block_id: int) -> None:
        """Gives a block that has none a window block with one reference and undefined content.
        Raises IndexError when all are held; callers check num_available first.
        """
        assert block_id not in self, f"block {block_id} has a window block already"
        if self._free:
            found = self._free.pop()
        elif self._idle:
            found = self._lose_idle()
        else:
            raise IndexError("no window block is free")
        self._window_block_of[block_id] = self._given[block_id] = found
        self._ref_counts[block_id] = 1

    def _lose_idle(self) -> int:
        block_id, _ = self._idle.popitem(last=False)
        found, self._window_block_of[block_id] = self._window_block_of[block_id], _NOWHERE
        return found

    def copy(self, source: int, block_id: int, *, keeps: bool) -> None:
        """Gives `block_id` a window block, into which that of `source` is copied; a reference moves there."""
        self.take(block_id)
        self._copies[self._window_block_of[block_id]] = self._window_block_of[source]
        self.release(source, keeps=keeps)

    def reference(self, block_id: int) -> None:
        """One more sequence has the block in its window."""
        assert block_id in self, f"block {block_id} has no window block to refer to"
        self._idle.pop(block_id, None)
        self._ref_counts[block_id] += 1

    def release(self, block_id: int, *, keeps: bool) -> None:
        """A sequence has it there no longer; `keeps`: the prefix cache knows the block."""
        count = self._ref_counts[block_id] - 1
        assert count >= 0, f"block {block_id} left more windows than it was in"
        self._ref_counts[block_id] = count
        if count:
            return
        if keeps:
            self._idle[block_id] = None
        else:
            self._give_back(block_id)

    def forget(self, block_id: int) -> None:
        """The prefix cache does not know the block any more."""
        if block_id in self._idle:
            del self._idle[block_id]
            self._give_back(block_id)

    def clear(self) -> None:
        """The prefix cache knows no block any more."""
        for block_id in self._idle:
            self._give_back(block_id)
        self._idle.clear()

    def _give_back(self, block_id: int) -> None:
        self._free.append(self._window_block_of[block_id])
        self._window_block_of[block_id] = _NOWHERE

    def drain(self) -> tuple[Pairs, Pairs]:
        """(block, window block) and (source, destination) of copies between window blocks, which the plan
        under construction must carry.
        """
        copies = tuple((source, into) for into, source in self._copies.items())
        given = tuple(self._given.items())
        self._given, self._copies = {}, {}
        return given, copies

    def check_invariants(self, references: dict[int, int], is_cached: Callable[[int], bool]) -> None:
        """Raises AssertionError unless every window block is in one state. `references` are those of the
        tables, by block.
        """
        taken = [each for each in self._window_block_of if each != _NOWHERE]
        assert sorted([*taken, *self._free, *self._absent]) == list(range(self.num_window_blocks)), (
            "a window block is lost or has two owners"
        )
        for block_id, count in enumerate(self._ref_counts):
            expected = references.get(block_id, 0)
            assert count == expected, f"block {block_id} is in {count} windows, tables say {expected}"
            has_one, kept = block_id in self, block_id in self._idle
            assert has_one == (count > 0 or kept), f"block {block_id} has a window block that nobody needs"
            assert not (kept and count), f"block {block_id} is held and kept"
            assert not kept or is_cached(block_id), f"block {block_id} is kept, but nobody can find it"
