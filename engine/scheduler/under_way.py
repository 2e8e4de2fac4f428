"""Prompt blocks that running sequences are computing, so that nobody computes them a second time.

Blocks become findable only after the step that filled them came back. Requests that arrive together and
share a prompt would all compute it; instead one of them does, and the others wait for its blocks.
"""

from __future__ import annotations

from engine.kv import BlockHash
from engine.scheduler.sequence import Sequence, Status


class BlocksUnderWay:
    """Hashes of prompt blocks that running sequences have yet to fill, while one plan is made."""

    def __init__(self, running: list[Sequence], block_size: int) -> None:
        self._block_size = block_size
        self._owners: dict[BlockHash, Sequence] = {}
        for sequence in running:
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """A sequence with a place, whose prompt is not wholly confirmed."""
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

    def num_tokens(self, sequence: Sequence, start: int) -> int:
        """Tokens of the waiting sequence from position `start` on that others are computing, in one piece.

        Those of a lower rank do not count: they may be held up by what waits behind the sequence. The last
        token is left to compute, as for every cached prefix.
        """
        first, count = start // self._block_size, 0
        for block_hash in sequence.hasher.hashes[first : (sequence.num_known - 1) // self._block_size]:
            owner = self._owners.get(block_hash)
            if owner is None or owner.status is not Status.RUNNING or owner.rank[:2] > sequence.rank[:2]:
                break
            count += 1
        return count * self._block_size
