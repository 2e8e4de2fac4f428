"""Waiting sequences whose prefix is on disk: it is read beside the steps, and then found like any other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import count, takewhile

from contract.prefix import BlockHash
from engine.kv import DiskRead, KvCache
from engine.policy.rates import StepRate
from engine.scheduler.sequence import Sequence


class DiskPrefixes:
    """Sets blocks apart for what is on disk, and gives them to the prefix cache when they are filled."""

    def __init__(self, cache: KvCache, speed: StepRate, s_per_token: float) -> None:
        """`s_per_token` is what reading a token's keys and values from disk takes."""
        self._cache = cache
        self._speed = speed
        self._s_per_token = s_per_token
        self._tokens = count()
        self._reads: dict[int, DiskRead] = {}
        self._under_way: dict[BlockHash, DiskRead] = {}

    @property
    def is_reading(self) -> bool:
        """Whether something is on its way that a sequence waits for."""
        return bool(self._reads)

    def begin_step(self, in_flight: Collection[int]) -> None:
        """Takes in what was read, and begins what may be: `in_flight` are the ids of the steps that are."""
        disk = self._cache.disk
        if disk is None or not self._reads:
            return
        for token, num_filled in disk.finished():
            read = self._reads.pop(token)
            self._cache.end_read(read, num_filled)
            read.is_done = True
            for block_hash in read.hashes:
                del self._under_way[block_hash]
        for read in self._reads.values():
            if not read.is_begun and all(step_id > read.after_step_id for step_id in in_flight):
                read.is_begun = True
                disk.read_later(read.token, tuple(zip(read.hashes, read.block_ids, strict=True)))

    def num_found(self, hashes: Iterable[BlockHash]) -> int:
        """How many of the first contents are on disk and worth reading."""
        disk = self._cache.disk
        return 0 if disk is None or not self._is_worth_it else disk.num_leading(hashes)

    @property
    def _is_worth_it(self) -> bool:
        """Whether reading a token's keys and values beats computing them, as measured."""
        speed = self._speed.prefill_tokens_per_s
        return not speed or self._s_per_token < 1 / speed

    def awaits(self, sequence: Sequence, step_id: int, num_free: Callable[[], int]) -> bool:
        """Whether the sequence, whose tokens are hashed, waits for the disk; what it waits for is begun.

        `num_free` says how many blocks may be set apart, of which those of the plan of `step_id` are none.
        """
        read = sequence.disk_read
        if read is not None and (not read.is_done or sequence.owns_disk_read):
            return not read.is_done
        first, hashes, num_on_host = self._missing(sequence)
        if not hashes:
            return False
        sequence.disk_read = self._under_way.get(hashes[0])
        if sequence.disk_read is not None:
            sequence.owns_disk_read = False
            return True
        num_blocks = self.num_found(hashes)
        if num_blocks > num_on_host:
            # Another sequence's read may cover what follows.
            most = max(0, min(num_blocks, num_free()))
            apart = takewhile(lambda each: each not in self._under_way, hashes[:most])
            num_blocks = sum(1 for _ in apart)
        if num_blocks <= num_on_host:
            return False
        self._begin(sequence, hashes[:num_blocks], sequence.hasher.parent_of(first), step_id)
        return True

    def _missing(self, sequence: Sequence) -> tuple[int, list[BlockHash], int]:
        """(index of the first block that is not on the device, hashes from there on, those on the host)."""
        found = self._cache.find_prefix(sequence.hasher, sequence.num_known)
        first, last = len(found.device_blocks), (sequence.num_known - 1) // self._cache.block_size
        return first, sequence.hasher.hashes[first:last], len(found.host_hashes)

    def _begin(
        self, sequence: Sequence, hashes: list[BlockHash], parent: BlockHash | None, step_id: int
    ) -> None:
        token = next(self._tokens)
        block_ids = self._cache.begin_read(tuple(hashes))
        read = DiskRead(token, tuple(hashes), block_ids, parent, step_id)
        self._reads[token] = sequence.disk_read = read
        sequence.owns_disk_read = True
        self._under_way |= dict.fromkeys(hashes, read)
