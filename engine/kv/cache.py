"""The KV cache as the scheduler sees it: prefixes found, tables grown, blocks shared, copied and given back.

Every change is bookkeeping only. The copies that must follow on the device are collected and handed over
with the step's plan (`drain_transfers`), as are the events for routers (`drain_events`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from contract.prefix import BlockHash, PrefixHasher, event_hash
from engine.kv.block_pool import BlockPool, BlockTable, HostTier
from engine.kv.disk import BlockDisk, DiskRead
from engine.kv.disk_reads import DiskReads
from engine.kv.division import Division, SharedMemory
from engine.kv.pins import Pins
from engine.kv.sequence_states import SequenceStates
from engine.kv.window_pool import WindowPool
from engine.types import BlocksEvicted, BlocksStored, KvEvent
from engine.types.memory import blocks_in_window

Pairs = tuple[tuple[int, int], ...]


class Prefix(msgspec.Struct, frozen=True):
    """Leading blocks of a prompt that need no computing. Valid until the next change of the cache."""

    device_blocks: tuple[int, ...] = ()
    # Hashes of the blocks after those, held in host memory.
    host_hashes: tuple[BlockHash, ...] = ()
    # Device blocks among them that are unreferenced now: using them takes from the available ones.
    num_revived: int = 0
    # The same of their window blocks, where only some layers have one.
    num_revived_in_window: int = 0
    # Leading blocks that are cached. Where a sequence has a state, those behind its last copy do not help.
    num_matched: int = 0
    # Hash of the block at whose end the copy lies, where there is one.
    state_hash: BlockHash | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks covered."""
        return len(self.device_blocks) + len(self.host_hashes)


class KvCache:
    """Blocks of one engine, with the prefix cache and the host tier behind it."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        num_host_blocks: int = 0,
        window: int | None = None,
        num_window_blocks: int = 0,
        division: Division | None = None,
        disk: BlockDisk | None = None,
        num_states: int = 0,
        max_num_seqs: int = 0,
        state_interval: int = 0,
    ) -> None:
        """`num_window_blocks`: where only some layers have a window, which `window` is then, theirs;
        `division`: of how many of both kinds there is memory at first, where that follows the load.
        `num_states`: slots for states, of which `max_num_seqs` are for sequences that run; copies are left
        every `state_interval` tokens. 0 where the model has none.
        """
        self.disk = disk if prefix_caching else None
        # Tokens that a position can look back on in layers with a window, itself included; None is all.
        self.window = window
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        present = None if division is None else division.num_blocks
        self._pool = BlockPool(num_blocks, self._evicted, num_present=present)
        # Only where other layers look at everything. Else blocks behind the window go as a whole.
        self._windows: WindowPool | None = None
        self._memory: SharedMemory | None = None
        if num_window_blocks:
            present = None if division is None else division.num_window_blocks
            self._windows = WindowPool(num_window_blocks, num_blocks, num_present=present)
            self._memory = SharedMemory(self._pool, self._windows, division)
        self._host = HostTier(num_host_blocks if prefix_caching else 0)
        self._copies: list[tuple[int, int]] = []
        # Host block to device block: later content of a host block replaces earlier content.
        self._offloads: dict[int, int] = {}
        self._restores: list[tuple[int, int]] = []
        self._events: list[KvEvent] = []
        # Whether content that is evicted goes to the host tier.
        self._moves_out = True
        # Where layers carry one beside keys and values.
        self.states: SequenceStates | None = None
        if num_states:
            interval = state_interval if prefix_caching else 0
            self.states = SequenceStates(
                num_slots=num_states,
                num_reserved=max_num_seqs,
                interval=interval,
                # As many as are left in as many tokens as the host has room for.
                num_host_states=num_host_blocks * block_size // interval if interval else 0,
                block_size=block_size,
                disk=self.disk,
                is_there=self._is_there,
            )
        # Held for other engines.
        self.pins = Pins(self._pool)
        self.reads = DiskReads(
            disk,
            self._pool,
            None if self.states is None else self.states.pool,
            offers=self._offer_read,
            is_there=self._is_there,
        )

    @property
    def has_states(self) -> bool:
        """Whether sequences have a state beside keys and values."""
        return self.states is not None

    @property
    def num_blocks(self) -> int:
        """Ids of blocks of the device: there is memory for `num_present` of them."""
        return self._pool.num_blocks

    @property
    def num_present(self) -> int:
        """Blocks that there is memory for."""
        return self._pool.num_present

    @property
    def num_present_window_blocks(self) -> int:
        """The same of window blocks."""
        return 0 if self._windows is None else self._windows.num_present

    @property
    def num_touched(self) -> int:
        """Blocks that were written at least once since the start."""
        return self._pool.num_touched

    @property
    def num_available(self) -> int:
        """Blocks not referenced by any sequence: free and cached ones."""
        return self._pool.num_available

    @property
    def num_evictable(self) -> int:
        """Blocks that no sequence holds and whose content can be reused."""
        return self._pool.num_evictable

    @property
    def has_window_blocks(self) -> bool:
        """Whether only some layers have a window, so that blocks have window blocks beside them."""
        return self._windows is not None

    @property
    def num_available_window_blocks(self) -> int:
        """Those that no sequence holds."""
        return 0 if self._windows is None else self._windows.num_available

    @property
    def most_window_blocks(self) -> int:
        """Window blocks that a sequence needs in order to go on, however long it is."""
        if self._windows is None or self.window is None:
            return 0
        return blocks_in_window(self.window, self.block_size)

    @property
    def has_host_tier(self) -> bool:
        """Whether evicted content may be kept in host memory."""
        return self._host.num_blocks > 0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, hasher: PrefixHasher, num_tokens: int, *, restore_worth_it: bool = True) -> Prefix:
        """The longest cached prefix of a sequence with `num_tokens` known tokens.

        At least the last token is left to compute, because its logits are needed. `restore_worth_it` says
        whether copying from the host beats computing.
        """
        if not self.prefix_caching:
            return Prefix()
        candidates = hasher.hashes[: (num_tokens - 1) // self.block_size]
        device = self._pool.lookup_leading(candidates)
        host: list[BlockHash] = []
        if restore_worth_it and len(self._host):
            for block_hash in candidates[len(device) :]:
                if block_hash not in self._host or self._pool.lookup(block_hash) is not None:
                    break
                host.append(block_hash)
        num_matched, state_hash, revived_in_window = len(device) + len(host), None, 0
        useful = num_matched
        if self._windows is not None:
            useful, revived_in_window = self._usable(device, candidates)
        elif self.states is not None:
            while useful and not self.states.has_copy(candidates[useful - 1], on_host=restore_worth_it):
                useful -= 1
        if self.has_states:
            state_hash = candidates[useful - 1] if useful else None
        device, host = device[:useful], host[: max(0, useful - len(device))]
        revived = self._pool.num_evictable_of(device)
        return Prefix(tuple(device), tuple(host), revived, revived_in_window, num_matched, state_hash)

    def _usable(self, device: list[int], hashes: list[BlockHash]) -> tuple[int, int]:
        """(the most of these blocks that a sequence can begin with, window blocks of them that nobody holds):
        all that its first position sees through a window must be there, and so must a state.
        """
        assert self._windows is not None, "asked only where there are window blocks"
        useful = len(device)
        while useful:
            first = self.num_behind_window(useful * self.block_size)
            seen = range(useful - 1, first - 1, -1)
            missing = next((at for at in seen if device[at] not in self._windows), -1)
            if missing >= 0:
                # Whoever begins behind it sees it, until it lies behind the window.
                useful = missing
            elif self.states is not None and hashes[useful - 1] not in self.states.pool:
                useful -= 1
            else:
                return useful, sum(map(self._windows.is_kept, device[first:useful]))
        return 0, 0

    def use(self, prefix: Prefix) -> None:
        """Nothing else of what nobody holds is given away later than these blocks."""
        self._pool.use(prefix.device_blocks)
        if self._windows is not None:
            self._windows.use(prefix.device_blocks)

    def adopt(self, table: BlockTable, prefix: Prefix) -> None:
        """Starts an empty table with a prefix; host blocks get a device block and a restore copy.

        The caller has checked that num_available covers num_revived and the host blocks.
        """
        assert not table.block_ids, "a prefix can only start a table"
        if self.states is not None:
            self.states.begin(table, prefix.state_hash)
        for block_id in prefix.device_blocks:
            self._pool.reference(block_id)
        table.block_ids.extend(prefix.device_blocks)
        # Taken out of the tier first: allocating may offload into it.
        host_blocks = [self._host.take(block_hash) for block_hash in prefix.host_hashes]
        for block_hash, host_block in zip(prefix.host_hashes, host_blocks, strict=True):
            block_id = self._pool.allocate()
            self._restores.append((host_block, block_id))
            self._pool.register(block_id, block_hash)
            table.block_ids.append(block_id)
        table.num_registered = len(table.block_ids)
        if self._windows is not None:
            table.window_start = self.num_behind_window(len(table) * self.block_size)
            table.window_end = len(table)
            for block_id in table.in_window:
                self._windows.reference(block_id)

    def share(self, table: BlockTable, parent: BlockTable, num_tokens: int) -> None:
        """Starts an empty table with the parent's blocks of the first `num_tokens` tokens, by reference; and
        with a copy of its state, which is that of exactly so many.
        """
        assert not table.block_ids, "a fork can only start a table"
        if self.states is not None:
            self.states.start(table, parent.state_slot)
        shared = parent.block_ids[: self.blocks_for(num_tokens)]
        for block_id in (*shared[: parent.num_sinks], *shared[parent.num_given_up :]):
            self._pool.reference(block_id)
        table.block_ids.extend(shared)
        table.num_given_up = table.num_given_up_sent = parent.num_given_up
        if self._windows is not None:
            table.window_start, table.window_end = parent.window_start, min(parent.window_end, len(shared))
            for block_id in table.in_window:
                self._windows.reference(block_id)
        table.num_registered = min(parent.num_registered, num_tokens // self.block_size)

    def num_behind_window(self, num_tokens: int) -> int:
        """Leading blocks that no position from `num_tokens` on can see, less one: rows that are computed once
        more stay inside what is kept.
        """
        if self.window is None:
            return 0
        return max(0, (num_tokens + 1 - self.window) // self.block_size - 1)

    def num_behind(self, table: BlockTable, num_tokens: int) -> int:
        """Leading blocks that no position of the sequence from `num_tokens` on looks at, but for the first
        ones of a sequence that forgets others.
        """
        kept = table.kept
        if kept is None:
            return self.num_behind_window(num_tokens)
        return kept.first_recent(num_tokens) if kept.num_hidden(num_tokens) else 0

    def give_up(self, table: BlockTable, num_tokens: int) -> None:
        """Drops references to the blocks behind the window of position `num_tokens` and later ones, and to
        those that it has forgotten; to window blocks, where only some layers have a window.

        Called between two plans, like `free`: no copy of the plan under construction may concern them.
        """
        if self._windows is not None:
            behind = min(self.num_behind_window(num_tokens), table.window_end)
            if behind > table.window_start:
                self._leave_windows(table.block_ids[table.window_start : behind])
                table.window_start = behind
            return
        first, last = table.num_given_up, min(self.num_behind(table, num_tokens), len(table))
        if table.kept is not None and not table.fresh:
            first = max(first, table.kept.num_sinks)
        if first >= last:
            return
        self._pool.release(reversed(table.block_ids[first:last]))
        table.block_ids[first:last] = table.fresh + [self.num_blocks] * (last - first - len(table.fresh))
        table.fresh = []
        table.num_given_up = last
        if table.kept is not None:
            # The runner finds out by the same rule.
            table.num_given_up_sent = last

    def _leave_windows(self, block_ids: list[int]) -> None:
        assert self._windows is not None, "called only where there are window blocks"
        for block_id in reversed(block_ids):
            self._windows.release(block_id, keeps=self._pool.is_cached(block_id))

    def num_new_window_blocks(self, table: BlockTable, start: int, end: int) -> int:
        """Window blocks that writing positions [start, end) takes."""
        if self._windows is None:
            return 0
        return max(0, self.blocks_for(end) - table.window_end) + len(self._shared_in(table, start, end))

    def num_alone_in_window(self, tables: Iterable[BlockTable]) -> int:
        """Window blocks that sequences hold, and nobody but they."""
        if self._windows is None:
            return 0
        held = Counter(block_id for table in tables for block_id in table.in_window)
        return sum(self._windows.ref_count(block_id) == count for block_id, count in held.items())

    def num_new_blocks(self, table: BlockTable, start: int, end: int) -> int:
        """Blocks that writing positions [start, end) takes: growth and copies of shared blocks."""
        growth = max(0, self.blocks_for(end) - len(table))
        return growth + len(self._shared_in(table, start, end))

    def prepare_write(self, table: BlockTable, start: int, end: int) -> None:
        """Makes positions [start, end) writable: shared blocks are copied, missing ones appended.

        The caller has checked num_new_blocks against num_available.
        """
        for index in self._shared_in(table, start, end):
            source = table.block_ids[index]
            copy = self._pool.allocate()
            self._copies.append((source, copy))
            if self._windows is not None:
                assert table.window_start <= index < table.window_end, "a block is written outside the window"
                self._windows.copy(source, copy, keeps=self._pool.is_cached(source))
            self._pool.release((source,))
            table.block_ids[index] = copy
            # A running sequence's table is only ever appended to on the runner's side, so a copy can only
            # happen before the runner learns of the block.
            assert index >= table.num_sent, "a block that the runner knows of became shared"
        while len(table) < self.blocks_for(end):
            table.block_ids.append(self._pool.allocate())

    def prepare_choice(self, table: BlockTable) -> None:
        """Gives a table that starts the fresh blocks for what is chosen of its prompt, if that is to be."""
        num_fresh = 0 if table.kept is None else table.kept.num_fresh
        table.fresh = [self._pool.allocate() for _ in range(num_fresh)]

    def make_room(self, num_blocks: int, num_window_blocks: int) -> bool:
        """Whether so many blocks and window blocks can be had now. Memory that one kind does not need for it
        goes to the other, where the division follows the load.
        """
        if self._memory is None:
            return num_blocks <= self.num_available
        return self._memory.make_room(num_blocks, num_window_blocks)

    def covers(self, there: tuple[int, int], needed: tuple[int, int]) -> bool:
        """Whether so many blocks and window blocks that are there cover those that are needed."""
        return needed[0] <= there[0] if self._memory is None else self._memory.covers(there, needed)

    def drain_retired(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Blocks, and window blocks, whose memory goes with the plan under construction."""
        return ((), ()) if self._memory is None else self._memory.drain_retired()

    def prepare_windows(self, table: BlockTable, end: int) -> None:
        """Gives the table's blocks up to position `end` window blocks, if there are such.

        The caller has checked num_new_window_blocks against num_available_window_blocks.
        """
        if self._windows is None:
            return
        last = self.blocks_for(end)
        for block_id in table.block_ids[table.window_end : last]:
            self._windows.take(block_id)
        table.window_end = max(table.window_end, last)

    def _shared_in(self, table: BlockTable, start: int, end: int) -> list[int]:
        last = min(len(table), self.blocks_for(end))
        return [
            index
            for index in range(start // self.block_size, last)
            if self._pool.ref_count(table.block_ids[index]) > 1
        ]

    def register(self, table: BlockTable, hasher: PrefixHasher, num_tokens: int) -> None:
        """Offers the full blocks of the first `num_tokens` tokens, all really computed, for reuse."""
        if not self.prefix_caching:
            return
        first = table.num_registered
        last = min(num_tokens // self.block_size, len(hasher.hashes), len(table))
        for index in range(first, last):
            block_id, block_hash = table.block_ids[index], hasher.hashes[index]
            if self._pool.register(block_id, block_hash):
                self._stored(block_hash, hasher.parent_of(index))
                if self.disk is not None:
                    self.disk.write_later(block_id, block_hash)
            elif self._windows is not None:
                self._replace(block_id, block_hash)
        table.num_registered = max(first, last)
        if self.states is not None:
            self.states.keep(table, hasher, num_tokens)

    def _replace(self, block_id: int, block_hash: BlockHash) -> None:
        """Lets a block be found in the place of one that has lost what layers with a window keep."""
        assert self._windows is not None, "called only where there are window blocks"
        holder = self._pool.lookup(block_hash)
        if holder is None or holder in self._windows or block_id not in self._windows:
            return
        if not self._pool.is_cached(block_id):
            self._pool.move(block_hash, block_id)

    def _is_there(self, block_hash: BlockHash) -> bool:
        return self._pool.lookup(block_hash) is not None or block_hash in self._host

    def _stored(self, block_hash: BlockHash, parent: BlockHash | None) -> None:
        parent_hash = event_hash(parent) if parent else 0
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksStored) and last.block_hashes[-1] == parent_hash:
            # One event for a whole run of blocks.
            self._events[-1] = BlocksStored((*last.block_hashes, event_hash(block_hash)), last.parent_hash)
        else:
            self._events.append(BlocksStored((event_hash(block_hash),), parent_hash))

    def free(self, table: BlockTable) -> None:
        """Gives all blocks back; the tail is evicted before the head, which more prompts may share."""
        if self._windows is not None:
            self._leave_windows(table.in_window)
        table.window_start = table.window_end = 0
        self._pool.release(reversed(table.held))
        if self.states is not None:
            self.states.free(table)
        table.block_ids, table.fresh = [], []
        table.num_registered = 0
        table.num_sent = 0
        table.num_given_up = table.num_given_up_sent = 0

    def begin_read(
        self, token: int, hashes: Sequence[BlockHash], parent: BlockHash | None, after_step_id: int
    ) -> DiskRead | None:
        """See DiskReads.begin. What the blocks held is not moved to the host: no plan could carry that before
        they are written.
        """
        self._let_move_out(moves_out=False)
        read = self.reads.begin(token, hashes, parent, after_step_id)
        self._let_move_out(moves_out=True)
        return read

    def _let_move_out(self, *, moves_out: bool) -> None:
        self._moves_out = moves_out
        if self.states is not None:
            self.states.moves_out = moves_out

    def _offer_read(self, block_id: int, block_hash: BlockHash, parent: BlockHash | None) -> None:
        if self._pool.register(block_id, block_hash):
            self._stored(block_hash, parent)

    def forget_contents(self) -> None:
        """Empties prefix cache and host tier, after a failure that leaves contents in doubt."""
        if self.disk is not None:
            self.disk.forget_all()
        if self.states is not None:
            self.states.clear()
        if self._windows is not None:
            self._windows.clear()
        lost = {event_hash(block_hash) for block_hash in (*self._pool.drop_cached(), *self._host.clear())}
        if lost:
            self._events.append(BlocksEvicted(tuple(sorted(lost))))

    def begin_step(self) -> None:
        """Called before the first change that belongs to a new plan."""
        self._host.begin_step()
        if self.states is not None:
            self.states.host.begin_step()

    def drain_transfers(self) -> tuple[Pairs, Pairs, Pairs]:
        """(block copies, offloads, restores) that the plan under construction must carry."""
        offloads = tuple((device, host) for host, device in self._offloads.items())
        transfers = tuple(self._copies), offloads, tuple(self._restores)
        self._copies, self._offloads, self._restores = [], {}, []
        return transfers

    def drain_window_blocks(self) -> tuple[Pairs, Pairs]:
        """(block, window block) and (source, destination) of copies between window blocks, which the plan
        under construction must carry.
        """
        return ((), ()) if self._windows is None else self._windows.drain()

    def drain_events(self) -> tuple[KvEvent, ...]:
        """Events since the last call."""
        events = tuple(self._events)
        self._events = []
        return events

    def _evicted(self, block_id: int, block_hash: BlockHash) -> None:
        if self.disk is not None:
            self.disk.forget(block_id)
        if self._windows is not None:
            self._windows.forget(block_id)
        keeps = self._host.num_blocks and self._moves_out
        stored = self._host.store(block_hash) if keeps else None
        if stored is None:
            lost = block_hash if block_hash not in self._host else None
        else:
            host_block, lost = stored
            self._offloads[host_block] = block_id
        if lost is not None:
            if self.states is not None:
                self.states.forget(lost)
            self._events.append(BlocksEvicted((event_hash(lost),)))

    def check_invariants(self, tables: Iterable[BlockTable]) -> None:
        """Raises AssertionError unless the tables account for every reference and no block is lost."""
        references = dict(self.pins.references)
        for block_id in self.reads.block_ids:
            references[block_id] = references.get(block_id, 0) + 1
        tables = list(tables)
        if self.states is not None:
            self.states.check_invariants(tables, self.reads.state_slots)
        for table in tables:
            assert len(set(table.held)) == table.num_held, "a table holds a block twice"
            given_up = table.block_ids[table.num_sinks : table.num_given_up]
            assert given_up == [self.num_blocks] * len(given_up), "a block given up is still named"
            for block_id in table.held:
                references[block_id] = references.get(block_id, 0) + 1
        if self._memory is not None:
            self._memory.check_invariants()
        self._pool.check_invariants(references)
        if self._windows is not None:
            held = Counter(block_id for table in tables for block_id in table.in_window)
            self._windows.check_invariants(held, self._pool.is_cached)
        self._host.check_invariants()
