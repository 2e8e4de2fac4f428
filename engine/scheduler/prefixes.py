"""What of a sequence without a slot need not be computed: it is cached, or others are computing it."""

from __future__ import annotations

from engine.kv import KvCache, Prefix
from engine.policy.line import Line
from engine.policy.pace import StepPace
from engine.scheduler.sequence import Sequence
from engine.scheduler.under_way import BlocksUnderWay

# Tokens of a sequence that are compared with what others compute, while it waits.
_LOOKED_AT_TOKENS = 8192


class Prefixes:
    """Looks sequences up in the cache. `host_s_per_token` is what bringing a token from the host takes."""

    def __init__(self, cache: KvCache, line: Line, speed: StepPace, host_s_per_token: float) -> None:
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
        return self._cache.find_prefix(sequence.hasher, sequence.num_known, restore_worth_it=is_cheaper)

    def num_to_compute(self, sequence: Sequence, running: list[Sequence]) -> int:
        """Tokens that the sequence adds to the work: those that are neither cached nor computed for somebody
        who runs or waits.
        """
        cache, hasher = self._cache, sequence.hasher
        if not cache.prefix_caching or sequence.needs_every_position:
            return sequence.num_known
        hasher.extend(sequence.token_ids, min(sequence.num_known, _LOOKED_AT_TOKENS))
        num_blocks, under_way = self.cached(sequence).num_blocks, BlocksUnderWay(running, cache.block_size)
        for block_hash in hasher.hashes[num_blocks : (sequence.num_known - 1) // cache.block_size]:
            if block_hash not in under_way and not self._line.wants(block_hash):
                break
            num_blocks += 1
        return sequence.num_known - num_blocks * cache.block_size
