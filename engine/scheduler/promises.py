"""Blocks that are kept free for those who may not be preempted any more."""

from __future__ import annotations

from engine.kv import KvCache
from engine.scheduler.sequence import RequestGroup, Sequence, Status


class Promises:
    """Running sequences, and beam searches, that find all blocks which they can still need."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._alone: dict[int, Sequence] = {}
        self._searches: dict[int, RequestGroup] = {}

    def make(self, sequence: Sequence) -> None:
        """All blocks that the sequence, or its beam search, can still need are free: they stay so for it."""
        group = sequence.group
        if not group.is_beam_search:
            self._alone[sequence.sequence_id] = sequence
            return
        self._searches[group.request.request_id] = group
        for beam in group.sequences:
            beam.awaits_promise = beam.boosted = True

    def stopped(self, sequence: Sequence) -> None:
        """The sequence has lost its slot. What a search is promised outlives the slots of its beams."""
        self._alone.pop(sequence.sequence_id, None)

    def ended(self, group: RequestGroup) -> None:
        """Nothing is left of the request."""
        self._searches.pop(group.request.request_id, None)

    def has(self, sequence: Sequence) -> bool:
        """Whether all blocks that the sequence can still need are kept free for it."""
        return sequence.sequence_id in self._alone or sequence.group.request.request_id in self._searches

    def num_reserved(self, *, besides: Sequence | None = None) -> int:
        """Blocks promised, those of `besides` left out."""
        if not self._alone and not self._searches:
            return 0
        own = None if besides is None else besides.group
        alone = (each for each in self._alone.values() if each is not besides)
        beams = (each for each in self._searches.values() if each is not own)
        return sum(map(self._reserve_of, alone)) + sum(map(self.reserve_of_beams, beams))

    def num_free(self, *, besides: Sequence | None = None) -> int:
        """Blocks that nobody holds and that are promised to nobody but `besides`."""
        return self._cache.num_available - self.num_reserved(besides=besides)

    def _reserve_of(self, sequence: Sequence) -> int:
        """Blocks that the sequence may still come to need, those that it will give up not counted against
        them: others may share these, and then they do not come free.
        """
        return max(0, self._cache.blocks_for(sequence.max_tokens_total - 1) - len(sequence.table))

    def reserve_of_beams(self, group: RequestGroup) -> int:
        """Blocks that a beam search may still come to need: at worst its beams end up sharing nothing."""
        held = {block_id for beam in group.sequences for block_id in beam.table.block_ids}
        most = self._cache.blocks_for(group.sequences[0].max_tokens_total - 1)
        return max(0, group.request.sampling.beam_width * most - len(held))

    def waiting_beam(self, skipped: set[int]) -> Sequence | None:
        """A beam that lost its slot while the blocks of its search are promised."""
        for group in self._searches.values():
            for beam in group.sequences:
                if beam.status is Status.WAITING and beam.sequence_id not in skipped:
                    return beam
        return None
