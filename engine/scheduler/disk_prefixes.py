"""Waiting sequences whose prefix is on disk, or at the engine that computed it: it is read beside the steps,
and then found like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import count, takewhile

from contract.prefix import BlockHash
from engine.kv import BlockPeers, DiskRead, KvCache, state_name
from engine.policy.rates import StepRate
from engine.scheduler.sequence import Sequence
from engine.types.hand_over import BlockSource


class DiskPrefixes:
    """Sets blocks apart for what comes from there, and has them in the prefix cache when they are filled."""

    def __init__(
        self, cache: KvCache, speed: StepRate, s_per_token: float, peers: BlockPeers | None = None
    ) -> None:
        """`s_per_token` is what reading a token's keys and values from disk takes."""
        self._cache = cache
        self._peers = peers if peers is not None and peers.receives else None
        self._speed = speed
        self._s_per_token = s_per_token
        self._tokens = count()
        self._reads: dict[int, DiskRead] = {}
        self._under_way: dict[BlockHash, DiskRead] = {}

    def begin_step(self, in_flight: Collection[int]) -> bool:
        """Takes in what was read, and begins what may be: `in_flight` are the ids of the steps that are.
        False where nothing is read any more.
        """
        disk, peers = self._cache.disk, self._peers
        for tier in (disk, peers):
            for token, num_filled in () if tier is None else tier.finished():
                self._end(self._reads[token], num_filled)
        for read in self._reads.values():
            if read.is_begun or any(step_id <= read.after_step_id for step_id in in_flight):
                continue
            read.is_begun = True
            if read.source is not None and peers is not None:
                peers.pull_later(read.token, read.wanted, read.source, read.limit_s)
            elif disk is not None:
                disk.read_later(read.token, read.wanted)
        return bool(self._reads)

    def _end(self, read: DiskRead, num_filled: int) -> None:
        del self._reads[read.token]
        self._cache.reads.end(read, num_filled)
        read.is_done = True
        for name, _ in read.wanted:
            del self._under_way[name]

    def can_wait(self, sequence: Sequence) -> bool:
        """Whether anything of its prefix may come from a disk or another engine."""
        return self._cache.disk is not None or self._source_of(sequence) is not None

    def leave(self, sequence: Sequence) -> None:
        """The sequence, which waits, has ended. What was begun for it is of no use to others that is not
        here already: another engine is not held up for that.
        """
        read = sequence.disk_read
        if read is None or read.is_done or not sequence.owns_disk_read or read.source is None:
            return
        if read.is_begun and self._peers is not None:
            self._peers.stop(read.token)
        else:
            self._end(read, 0)

    def _source_of(self, sequence: Sequence) -> BlockSource | None:
        return None if self._peers is None else sequence.source

    def awaits_source(self, sequence: Sequence) -> bool:
        """Whether what it waits for comes from another engine."""
        return sequence.disk_read is not None and sequence.disk_read.source is not None

    def num_found(self, sequence: Sequence, hashes: list[BlockHash]) -> int:
        """How many of the first contents can be used once those on disk are read, where that is worth it; of
        a sequence whose prompt another engine has computed, all that it can have computed.
        """
        if self._source_of(sequence) is not None:
            return min(len(hashes), sequence.num_prompt_tokens // self._cache.block_size)
        return self._cache.reads.num_worth_it(hashes) if self._is_worth_it else 0

    @property
    def _is_worth_it(self) -> bool:
        """Whether reading a token's keys and values beats computing them, as measured."""
        speed = self._speed.prefill_tokens_per_s
        return not speed or self._s_per_token < 1 / speed

    def awaits(self, sequence: Sequence, step_id: int, num_free: Callable[[], int]) -> bool:
        """Whether the sequence, whose tokens are hashed, waits for it; what it waits for is begun.

        `num_free` says how many blocks may be set apart, of which those of the plan of `step_id` are none.
        """
        read = sequence.disk_read
        if read is not None and (not read.is_done or sequence.owns_disk_read):
            return not read.is_done
        first, hashes, num_on_host = self._missing(sequence)
        if not hashes:
            return False
        num_blocks = self.num_found(sequence, hashes)
        if num_blocks > num_on_host:
            num_blocks = min(num_blocks, max(0, num_free()))
        names = hashes[:1]
        if self._cache.has_states and num_blocks:
            # All of it, and the state behind it, or nothing.
            num_blocks = self.num_found(sequence, hashes[:num_blocks])
            names += (*hashes[:num_blocks], *map(state_name, hashes[num_blocks - 1 : num_blocks]))
        sequence.disk_read = next(filter(None, map(self._under_way.get, names)), None)
        if sequence.disk_read is not None:
            sequence.owns_disk_read = False
            return True
        # Another sequence's read may cover what follows.
        num_blocks = sum(1 for _ in takewhile(lambda each: each not in self._under_way, hashes[:num_blocks]))
        if num_blocks <= num_on_host:
            return False
        return self._begin(sequence, hashes[:num_blocks], sequence.hasher.parent_of(first), step_id)

    def _missing(self, sequence: Sequence) -> tuple[int, list[BlockHash], int]:
        """(index of the first block that is not on the device, hashes from there on, those on the host)."""
        found = self._cache.find_prefix(sequence.hasher, sequence.num_findable)
        first, last = len(found.device_blocks), (sequence.num_findable - 1) // self._cache.block_size
        return first, sequence.hasher.hashes[first:last], len(found.host_hashes)

    def _begin(
        self, sequence: Sequence, hashes: list[BlockHash], parent: BlockHash | None, step_id: int
    ) -> bool:
        read = self._cache.begin_read(next(self._tokens), hashes, parent, step_id)
        if read is None:
            return False
        self._reads[read.token] = sequence.disk_read = read
        sequence.owns_disk_read = True
        read.source = self._source_of(sequence)
        if read.source is not None:
            # A ticket is good for one pull.
            sequence.source = None
            read.limit_s = self._speed.seconds_for(len(read.hashes) * self._cache.block_size)
        self._under_way |= {name: read for name, _ in read.wanted}
        return True
