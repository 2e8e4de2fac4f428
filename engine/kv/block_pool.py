"""Reference-counted blocks of fixed size, of which the unreferenced ones may keep reusable content.

A block is in exactly one of three states:
  referenced   ref_count > 0; may be cached (registered under a hash) or not
  evictable    ref_count = 0 and cached; a new prompt can revive it; least recently used is evicted first
  free         ref_count = 0 and not cached
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import takewhile

from contract.prefix import BlockHash
from engine.types import KeptBlocks

# The blocks of one sequence, in the order of its tokens.
# Where every layer has a sliding window, leading blocks that lie before it are given up: the table keeps
# its length, and names the spare block (whose id is the number of blocks) in their places. So it does where
# the sequence may forget what lies between its first blocks and its last ones.


class BlockTable:
    """Block i holds positions [i * block_size, (i + 1) * block_size). Changed by KvCache alone."""

    __slots__ = (
        "block_ids",
        "copies",
        "copy_at",
        "draft_copies",
        "fresh",
        "kept",
        "num_given_up",
        "num_given_up_sent",
        "num_registered",
        "num_sent",
        "state_slot",
        "window_end",
        "window_start",
    )

    def __init__(self, kept: KeptBlocks | None = None) -> None:
        self.block_ids: list[int] = []
        # Where some are forgotten: those that are not.
        self.kept = kept
        # Blocks that take the place of the prompt's when that is computed and its tokens are chosen.
        self.fresh: list[int] = []
        # Leading blocks that were offered to the prefix cache already.
        self.num_registered = 0
        # Leading blocks that the runner knows of.
        self.num_sent = 0
        # Leading blocks without a reference, but for the first that are kept, and as many of them as the
        # runner knows of.
        self.num_given_up = 0
        self.num_given_up_sent = 0
        # Where the sequence's state lies, in models that have one; -1 while it has no slot.
        self.state_slot = -1
        # (tokens that it holds, slot) of copies of it that steps in flight leave.
        self.copies: list[tuple[int, int]] = []
        # The same of those behind drafted tokens, while it is not known how many of them are right.
        self.draft_copies: list[tuple[int, int]] = []
        # Numbers of tokens after which one is wanted, besides the regular ones.
        self.copy_at: set[int] = set()
        # Blocks [start, end) that it has in a window, where only some layers have one.
        self.window_start = self.window_end = 0

    def __len__(self) -> int:
        return len(self.block_ids)

    @property
    def held(self) -> list[int]:
        """Blocks that the sequence has a reference to."""
        behind = self.block_ids[self.num_given_up :] + self.fresh
        return self.block_ids[: self.num_sinks] + behind if self.num_sinks else behind

    @property
    def num_sinks(self) -> int:
        """Of the leading blocks that were given up: the first ones, which it holds all the same."""
        return 0 if self.kept is None or not self.num_given_up else self.kept.num_sinks

    @property
    def num_held(self) -> int:
        """Number of these."""
        return len(self.block_ids) - self.num_given_up + self.num_sinks + len(self.fresh)

    @property
    def in_window(self) -> list[int]:
        """Blocks that the sequence has in a window, where only some layers have one."""
        return self.block_ids[self.window_start : self.window_end]

    @property
    def num_in_window(self) -> int:
        """Number of these."""
        return self.window_end - self.window_start

    def drain_given_up(self) -> int:
        """Leading blocks given up, once after each change and then 0."""
        if self.num_given_up == self.num_given_up_sent:
            return 0
        self.num_given_up_sent = self.num_given_up
        return self.num_given_up

    def drain_unsent(self) -> tuple[int, ...]:
        """Blocks appended since the last call, which the runner has not been sent."""
        unsent = tuple(self.block_ids[self.num_sent :])
        self.num_sent = len(self.block_ids)
        return unsent


# Host memory behind the device's prefix cache: evicted blocks are copied out and brought back on a hit.
# A preempted sequence needs no path of its own: its full blocks stay in the prefix cache, move to the host
# when they are evicted, and are restored when the sequence (or anyone with the same prefix) comes back.


class HostTier:
    """Which host block holds which content. Least recently used content makes room."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[BlockHash, int] = OrderedDict()
        # Being read by the plan under construction; reusable from the next plan on. Content that stays for
        # others is lent.
        self._reading: list[int] = []
        self._lent: set[BlockHash] = set()

    def __len__(self) -> int:
        return len(self._cached)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._cached

    def begin_step(self) -> None:
        """Host blocks that the previous plan read may be overwritten from now on."""
        self._free.extend(self._reading)
        self._reading.clear()
        self._lent.clear()

    def store(self, block_hash: BlockHash) -> tuple[int, BlockHash | None] | None:
        """A host block to copy content into, with the content it replaces; None when nothing can be kept."""
        if block_hash in self._cached:
            self._cached.move_to_end(block_hash)
            return None
        replaced = None
        if self._free:
            host_block = self._free.pop()
        else:
            replaced = next((each for each in self._cached if each not in self._lent), None)
            if replaced is None:
                return None
            host_block = self._cached.pop(replaced)
        self._cached[block_hash] = host_block
        return host_block, replaced

    def take(self, block_hash: BlockHash) -> int:
        """The host block to restore from; the content leaves the tier, for the device will hold it."""
        host_block = self._cached.pop(block_hash)
        self._reading.append(host_block)
        return host_block

    def lend(self, block_hash: BlockHash) -> int:
        """The host block to copy from; the content stays."""
        self._cached.move_to_end(block_hash)
        self._lent.add(block_hash)
        return self._cached[block_hash]

    def forget(self, block_hash: BlockHash) -> None:
        """The content is of no use any more, if it is there."""
        host_block = self._cached.pop(block_hash, None)
        if host_block is not None:
            # A plan may be about to read it.
            self._reading.append(host_block)

    def clear(self) -> list[BlockHash]:
        """Forgets all content and returns what it was."""
        dropped = list(self._cached)
        self._free.extend(self._cached.values())
        self._cached.clear()
        return dropped

    def check_invariants(self) -> None:
        """Raises AssertionError unless every host block is in exactly one list."""
        blocks = [*self._free, *self._cached.values(), *self._reading]
        assert sorted(blocks) == list(range(self.num_blocks)), "a host block is lost or in two lists"


# Told (block id, hash) just before a cached block loses its content.
OnEvict = Callable[[int, BlockHash], None]


class MemoryPool:
    """Ids of pieces of memory. Each is held, free, or absent, which is without memory now; or nobody holds
    it, but its content may be of use, and the least recently used makes room (`_idle`, by block).
    """

    def __init__(self, num_ids: int, num_present: int | None) -> None:
        self._num_ids = num_ids
        present = num_ids if num_present is None else num_present
        # Taken from the end, so that low ids are used first.
        self._free = list(range(present - 1, -1, -1))
        self._absent = list(range(num_ids - 1, present - 1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    def _lose_idle(self) -> int:
        """The id that comes free where the least recently used makes room."""
        raise NotImplementedError

    @property
    def num_available(self) -> int:
        """Those that can be taken now."""
        return len(self._free) + len(self._idle)

    @property
    def num_present(self) -> int:
        """Those that there is memory for."""
        return self._num_ids - len(self._absent)

    @property
    def num_absent(self) -> int:
        """The others."""
        return len(self._absent)

    def use(self, block_ids: Iterable[int]) -> None:
        """Of what nobody holds, these make room last."""
        for block_id in block_ids:
            if block_id in self._idle:
                self._idle.move_to_end(block_id)

    def retire(self, count: int) -> list[int]:
        """Takes so many available ones out of use, free ones first; their memory may go."""
        found, self._free = self._free[:count], self._free[count:]
        while len(found) < count:
            found.append(self._lose_idle())
        self._absent += found
        return found

    def restore(self, count: int) -> list[int]:
        """Brings so many absent ones into use, and returns them."""
        found = [self._absent.pop() for _ in range(count)]
        self._free[:0] = found
        return found


class BlockPool(MemoryPool):
    """The blocks of one device. All ids are in [0, num_blocks)."""

    def __init__(self, num_blocks: int, on_evict: OnEvict, *, num_present: int | None = None) -> None:
        """`num_present`: blocks that there is memory for, where there are more ids."""
        super().__init__(num_blocks, num_present)
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._ref_counts = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._cached: dict[BlockHash, int] = {}
        # Blocks that were allocated at least once; the others' memory was never touched.
        self.num_touched = 0

    @property
    def num_evictable(self) -> int:
        """Unreferenced blocks that are registered under a hash."""
        return len(self._idle)

    def ref_count(self, block_id: int) -> int:
        """References to the block."""
        return self._ref_counts[block_id]

    def is_cached(self, block_id: int) -> bool:
        """Whether the block is found by a hash."""
        return self._hashes[block_id] is not None

    def lookup(self, block_hash: BlockHash) -> int | None:
        """Block that holds this content; it is not referenced by the look-up."""
        return self._cached.get(block_hash)

    def lookup_leading(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Blocks of the first contents, as many as are held; long prompts have hundreds."""
        held = takewhile(self._cached.__contains__, hashes)
        return list(map(self._cached.__getitem__, held))

    def num_evictable_of(self, block_ids: Iterable[int]) -> int:
        """How many are cached and unreferenced, so that reviving them costs available blocks."""
        return sum(map(self._idle.__contains__, block_ids))

    def allocate(self) -> int:
        """A block with one reference and undefined content, evicting the least recently used if need be.

        Raises IndexError when every block is referenced; callers check num_available first.
        """
        if self._free:
            block_id = self._free.pop()
            self.num_touched = max(self.num_touched, block_id + 1)
        else:
            if not self._idle:
                raise IndexError("no block is free")
            block_id = self._lose_idle()
        self._ref_counts[block_id] = 1
        return block_id

    def reference(self, block_id: int) -> None:
        """Adds a reference to a referenced or evictable block."""
        if self._ref_counts[block_id] == 0:
            del self._idle[block_id]
        self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drops one reference of each. The first released is the first to be evicted later."""
        for block_id in block_ids:
            count = self._ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} released more often than referenced"
            self._ref_counts[block_id] = count
            if count == 0:
                if self._hashes[block_id] is None:
                    self._free.append(block_id)
                else:
                    self._idle[block_id] = None

    def register(self, block_id: int, block_hash: BlockHash) -> bool:
        """Makes a referenced block findable. False when another block holds this content already."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} registered without a reference"
        if block_hash in self._cached or self._hashes[block_id] is not None:
            return False
        self._cached[block_hash] = block_id
        self._hashes[block_id] = block_hash
        return True

    def move(self, block_hash: BlockHash, block_id: int) -> None:
        """Lets a referenced block be found by a content in place of the block that was found so far."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} takes a hash without a reference"
        assert self._hashes[block_id] is None, f"block {block_id} has a hash already"
        holder = self._cached[block_hash]
        self._hashes[holder], self._hashes[block_id] = None, block_hash
        self._cached[block_hash] = block_id
        if holder in self._idle:
            del self._idle[holder]
            self._free.append(holder)

    def drop_cached(self) -> list[BlockHash]:
        """Empties the prefix cache and returns what it held: unreferenced blocks become free."""
        dropped = list(self._cached)
        for block_id in self._cached.values():
            self._hashes[block_id] = None
        self._cached.clear()
        self._free.extend(self._idle)
        self._idle.clear()
        return dropped

    def _lose_idle(self) -> int:
        block_id, _ = self._idle.popitem(last=False)
        block_hash = self._hashes[block_id]
        assert block_hash is not None
        self._on_evict(block_id, block_hash)
        del self._cached[block_hash]
        self._hashes[block_id] = None
        return block_id

    def check_invariants(self, references: dict[int, int]) -> None:
        """Raises AssertionError unless the bookkeeping is whole.

        `references` maps block id to the number of block tables that hold it, counted by the caller.
        """
        free, evictable, absent = set(self._free), set(self._idle), set(self._absent)
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not free & evictable, f"blocks both free and evictable: {free & evictable}"
        assert len(absent) == len(self._absent), "a block is absent twice"
        assert not absent & (free | evictable), "a block without memory can be had"
        for block_id, count in enumerate(self._ref_counts):
            expected = references.get(block_id, 0)
            assert count == expected, f"block {block_id} has {count} references, tables hold {expected}"
            block_hash = self._hashes[block_id]
            unreferenced = block_id in free or block_id in evictable or block_id in absent
            assert unreferenced == (count == 0), (
                f"block {block_id}: {count} references, in a list: {unreferenced}"
            )
            if block_id in free or block_id in absent:
                assert block_hash is None, f"free block {block_id} is cached"
            if block_id in evictable:
                assert block_hash is not None, f"evictable block {block_id} is not cached"
            if block_hash is not None:
                assert self._cached.get(block_hash) == block_id, f"hash of block {block_id} leads elsewhere"
        hashed = sum(block_hash is not None for block_hash in self._hashes)
        assert hashed == len(self._cached), "the prefix cache lists blocks that have no hash"
