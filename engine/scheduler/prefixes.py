"""What of a sequence without a slot need not be computed: it is cached, or others are computing it."""

from __future__ import annotations

from contract.prefix import BlockHash
from engine.kv import KvCache, Prefix
from engine.policy.line import Line
from engine.policy.rates import StepRate
from engine.scheduler.disk_prefixes import DiskPrefixes
from engine.scheduler.sequence import Awaited, Sequence, Status

# Prompt blocks that running sequences are computing, so that nobody computes them a second time.
# Blocks become findable only after the step that filled them came back. Requests that arrive together and
# share a prompt would all compute it; instead one of them does, and the others wait for its blocks.

# Part of its tokens that others must be computing already for a sequence to wait for them.
_WORTH_WAITING = 0.25


class BlocksUnderWay:
    """Hashes of prompt blocks that running sequences have yet to fill, while one plan is made."""

    def __init__(self, running: list[Sequence], block_size: int) -> None:
        self._block_size = block_size
        self._owners: dict[BlockHash, Sequence] = {}
        for sequence in running:
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """A sequence with a slot, whose prompt is not wholly confirmed."""
        if sequence.num_confirmed >= sequence.prefill_end:
            return
        last = sequence.prefill_end // self._block_size
        for block_hash in sequence.hasher.hashes[sequence.table.num_registered : last]:
            self._owners.setdefault(block_hash, sequence)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._owners

    @property
    def is_empty(self) -> bool:
        """Whether nobody computes a block that could be shared."""
        return not self._owners

    def awaited(self, sequence: Sequence, start: int) -> Awaited | None:
        """What the waiting sequence, which would compute from position `start` on, had better wait for:
        tokens that others are computing, in one piece. None where computing them would take as long.

        Those of a lower rank do not count: they may be held up by what waits behind the sequence. The last
        token is left to compute, as for every cached prefix.
        """
        first, last = start // self._block_size, (sequence.num_findable - 1) // self._block_size
        rank, own, count = sequence.rank[:2], 0, 0
        head: Sequence | None = None
        owner: Sequence | None = None
        for block_hash in sequence.hasher.hashes[first:last]:
            found = self._owners.get(block_hash)
            if found is not owner:
                # A prompt has few owners, and many blocks.
                if found is None or found.status is not Status.RUNNING or found.rank[:2] > rank:
                    break
                owner, head = found, head or found
            own += owner is head
            count += 1
        if head is None or not _is_worth_waiting(count * self._block_size, sequence, start):
            return None
        return Awaited(head, head.epoch, start, start + own * self._block_size)

    def goes_on(self, sequence: Sequence) -> bool:
        """Whether what the sequence was found to wait for is still being computed, and worth waiting for.
        Known without a look at each block, which would take milliseconds of every step where many wait.
        """
        awaited = sequence.awaited
        if awaited is None:
            return False
        owner = awaited.owner
        if owner.status is not Status.RUNNING or owner.epoch != awaited.epoch:
            return False
        if owner.rank[:2] > sequence.rank[:2]:
            return False
        start = max(awaited.start, owner.table.num_registered * self._block_size)
        return _is_worth_waiting(awaited.end - start, sequence, start)


def _is_worth_waiting(num_tokens: int, sequence: Sequence, start: int) -> bool:
    """Whether so many tokens are a large part of what the sequence has to compute from `start` on."""
    return num_tokens > 0 and num_tokens >= _WORTH_WAITING * (sequence.num_known - start)


# Tokens of a sequence that are compared with what others compute, while it waits.
_LOOKED_AT_TOKENS = 8192


class Prefixes:
    """Looks sequences up in the cache. `host_s_per_token` is what bringing a token from the host takes."""

    def __init__(
        self,
        cache: KvCache,
        line: Line,
        speed: StepRate,
        host_s_per_token: float,
        on_disk: DiskPrefixes | None,
    ) -> None:
        self._on_disk = on_disk
        self._cache = cache
        self._line = line
        self._speed = speed
        self._host_s_per_token = host_s_per_token

    def cached(self, sequence: Sequence) -> Prefix:
        """What is found of the tokens hashed so far; on the host only where copying a token's keys and values
        beats computing them, as measured.
        """
        speed = self._speed.prefill_tokens_per_s
        is_cheaper = not speed or self._host_s_per_token < 1 / speed
        return self._cache.find_prefix(sequence.hasher, sequence.num_findable, restore_worth_it=is_cheaper)

    def num_to_compute(self, sequence: Sequence, running: list[Sequence]) -> int:
        """Tokens that the sequence adds to the work: those that are neither cached nor computed for somebody
        who runs or waits.
        """
        cache, hasher = self._cache, sequence.hasher
        if not cache.prefix_caching or sequence.needs_every_position:
            return sequence.num_known
        hasher.extend(sequence.token_ids, min(sequence.num_known, _LOOKED_AT_TOKENS))
        num_blocks, under_way = self.cached(sequence).num_blocks, BlocksUnderWay(running, cache.block_size)
        last = (sequence.num_findable - 1) // cache.block_size
        if self._on_disk is not None:
            num_blocks += self._on_disk.num_found(sequence, hasher.hashes[num_blocks:last])
        for block_hash in hasher.hashes[num_blocks:last]:
            if block_hash not in under_way and not self._line.wants(block_hash):
                break
            num_blocks += 1
        return sequence.num_known - num_blocks * cache.block_size
