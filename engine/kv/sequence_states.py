"""States that layers carry from token to token: where a sequence's lies, what it begins with, what is left.

A state cannot be cut to an earlier position. So copies are left at ends of blocks, from which sequences with
the same beginning go on, and before each drafted token, from which its sequence goes on if that is rejected.
"""

from __future__ import annotations

from collections.abc import Callable

from contract.prefix import BlockHash, PrefixHasher
from engine.kv.block_pool import BlockTable, HostTier
from engine.kv.disk import BlockDisk, state_name
from engine.kv.state_pool import StatePool
from engine.types.places import place_of

Pairs = tuple[tuple[int, int], ...]


class SequenceStates:
    """Of one cache. What follows on the device is collected for the step's plan (`drain`)."""

    def __init__(
        self,
        *,
        num_slots: int,
        num_reserved: int,
        interval: int,
        num_host_states: int,
        block_size: int,
        disk: BlockDisk | None,
        is_there: Callable[[BlockHash], bool],
    ) -> None:
        """`num_reserved` slots are for sequences that run; copies are left every `interval` tokens, none
        where it is 0. `is_there` says whether the cache has the content of a block.
        """
        self.interval = interval
        self.pool = StatePool(num_slots, num_reserved, self._lost)
        # Copies that made room.
        self.host = HostTier(num_host_states)
        # Whether they may go there: a plan is under construction.
        self.moves_out = True
        self._block_size = block_size
        self._disk = disk
        self._is_there = is_there
        # Destination to source, slots or rows of the host: of two copies into one the later counts.
        self._copies: dict[int, int] = {}
        self._offloads: dict[int, int] = {}
        self._restores: dict[int, int] = {}
        # Of what drafts have left: slots that the plan under construction reads, and which are free then, or
        # a copy of the table's at so many tokens.
        self._settled: list[tuple[int, BlockTable, int]] = []

    @property
    def can_start(self) -> bool:
        """Whether a sequence finds a slot."""
        return self.pool.num_available > 0

    def has_copy(self, block_hash: BlockHash, *, on_host: bool) -> bool:
        """Whether a copy of the state behind a block is there."""
        return block_hash in self.pool or (on_host and block_hash in self.host)

    def begin(self, table: BlockTable, block_hash: BlockHash | None) -> None:
        """Gives a table a slot with a copy of the state behind a block; without one it begins with zeros."""
        if block_hash is None or block_hash in self.pool:
            self.start(table, None if block_hash is None else self.pool.find(block_hash))
            return
        # Before a slot is taken, whose copy may make room on the host.
        row = self.host.lend(block_hash)
        self.start(table, None)
        self._restores[table.state_slot] = row

    def start(self, table: BlockTable, source: int | None) -> None:
        """Gives a table a slot, into which that of `source` is copied; else it begins with zeros."""
        table.state_slot = self.pool.take()
        self._copies.pop(table.state_slot, None)
        self._restores.pop(table.state_slot, None)
        if source is not None and source != table.state_slot:
            self._copies[table.state_slot] = source

    def leave(self, table: BlockTable, hasher: PrefixHasher, start: int, end: int) -> Pairs:
        """(tokens, slot) of the copies that a row of positions [start, end) leaves at ends of blocks,
        ascending. They count once `keep` is told so. Where slots are few, the last ones are preferred.
        """
        interval = self.interval
        if not interval:
            return ()
        wanted = {each for each in table.copy_at if start < each <= end}
        wanted.update(range((start // interval + 1) * interval, end + 1, interval))
        found: list[tuple[int, int]] = []
        for num_tokens in sorted(wanted, reverse=True):
            index = num_tokens // self._block_size - 1
            if index < len(hasher.hashes) and self.has_copy(hasher.hashes[index], on_host=True):
                continue
            slot = self.pool.take_for_copy()
            if slot is None:
                break
            found.append((num_tokens, slot))
        found.reverse()
        table.copies += found
        return tuple(found)

    @property
    def most_drafts(self) -> int:
        """Drafted tokens for which a row finds slots."""
        return self.pool.num_for_copies

    def leave_behind_drafts(self, table: BlockTable, first: int, num_drafts: int) -> Pairs:
        """(tokens, slot) of the copies that a row leaves before its drafts, from `first` tokens on."""
        for num_tokens in range(first, first + num_drafts):
            slot = self.pool.take_for_copy()
            assert slot is not None, "the caller has asked for more drafts than there are slots"
            table.draft_copies.append((num_tokens, slot))
        return tuple(table.draft_copies)

    def settle(self, table: BlockTable, num_accepted: int) -> None:
        """So many drafts of the table's last row were right: its state is that behind them."""
        left, table.draft_copies = table.draft_copies, []
        if num_accepted < len(left):
            self._copies[table.state_slot] = left[num_accepted][1]
        for num_tokens, slot in left[: num_accepted + 1]:
            self._settled.append((slot, table, num_tokens))
        for _, slot in left[num_accepted + 1 :]:
            self.pool.drop_copy(slot)

    def keep(self, table: BlockTable, hasher: PrefixHasher, num_tokens: int) -> None:
        """Copies at ends of blocks of the first `num_tokens` tokens have arrived."""
        while table.copies and table.copies[0][0] <= num_tokens:
            held, slot = table.copies.pop(0)
            block_hash = hasher.hashes[held // self._block_size - 1]
            if not self._is_there(block_hash):
                self.pool.drop_copy(slot)
            elif self.pool.keep(slot, block_hash) and self._disk is not None:
                self._disk.write_later(place_of(slot), state_name(block_hash))

    def free(self, table: BlockTable) -> None:
        """The sequence is gone, or begins anew."""
        if table.state_slot >= 0:
            self._copies.pop(table.state_slot, None)
            self._restores.pop(table.state_slot, None)
            self.pool.release(table.state_slot)
        for _, slot in (*table.copies, *table.draft_copies):
            self.pool.drop_copy(slot)
        table.state_slot, table.copies, table.draft_copies = -1, [], []
        table.copy_at.clear()

    def forget(self, block_hash: BlockHash) -> None:
        """The block is lost, and without it nobody can begin behind it."""
        self.pool.forget(block_hash)
        self.host.forget(block_hash)

    def clear(self) -> None:
        """Forgets all copies that can be found."""
        self.pool.clear()
        self.host.clear()

    def drain(self) -> tuple[Pairs, Pairs, Pairs]:
        """(copies, offloads, restores) that the plan under construction must carry, as (source, destination):
        slots, and rows of the host.
        """
        waiting = self._copies, self._offloads, self._restores
        self._copies, self._offloads, self._restores = {}, {}, {}
        settled, self._settled = self._settled, []
        for slot, table, num_tokens in settled:
            if self.interval and not num_tokens % self.interval and table.state_slot >= 0:
                table.copies.append((num_tokens, slot))
            else:
                self.pool.drop_copy(slot)
        copies, offloads, restores = (
            tuple((source, into) for into, source in each.items()) for each in waiting
        )
        return copies, offloads, restores

    def _lost(self, slot: int, evicted: BlockHash | None) -> None:
        if self._disk is not None:
            self._disk.forget(place_of(slot))
        if evicted is not None and self.moves_out:
            stored = self.host.store(evicted)
            if stored is not None:
                self._offloads[stored[0]] = slot

    def check_invariants(self, tables: list[BlockTable], set_apart: set[int]) -> None:
        """Raises AssertionError unless every slot, and every row of the host, is in one state."""
        left = [slot for table in tables for _, slot in (*table.copies, *table.draft_copies)]
        held = [table.state_slot for table in tables if table.state_slot >= 0]
        self.pool.check_invariants(held, [*set_apart, *left, *(slot for slot, _, _ in self._settled)])
        self.host.check_invariants()
