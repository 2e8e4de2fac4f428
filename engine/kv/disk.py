"""What the cache asks of a disk that keeps blocks beyond the life of the process, and what is being read.

A state, where layers carry one, is kept like a block: its slot has a number below 0 (engine.types.places),
and its content a name of its own, derived from the hash of the block that it stands behind (`state_name`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from contract.prefix import BlockHash
from engine.types import DiskCounters
from engine.types.hand_over import BlockSource
from engine.types.places import place_of

_FLIPPED = bytes(255 - each for each in range(256))


def state_name(block_hash: BlockHash) -> BlockHash:
    """The name of the state behind a block. No block has it: that would be a collision of hashes."""
    return block_hash.translate(_FLIPPED)


class BlockDisk(Protocol):
    """The runner's disk tier (engine.runner.prefix_disk). No method waits for a disk."""

    def num_leading(self, hashes: Iterable[BlockHash]) -> int:
        """How many of the first contents are on disk, as far as is known."""

    def write_later(self, block_id: int, block_hash: BlockHash) -> None:
        """The block holds this content until `forget`."""

    def forget(self, block_id: int) -> None:
        """The block is about to get other content."""

    def forget_all(self) -> None:
        """What blocks hold is in doubt."""

    def use(self, hashes: Sequence[BlockHash]) -> None:
        """Somebody asked for these contents."""

    def read_later(self, token: int, blocks: Sequence[tuple[BlockHash, int]]) -> None:
        """Begins to read contents into blocks that nobody reads or writes until `finished` has the token."""

    def finished(self) -> list[tuple[int, int]]:
        """Tokens of what is read since the last call, each with how many of its first blocks are filled."""

    def counters(self) -> DiskCounters:
        """What happened since the start."""


@dataclass(eq=False, slots=True)
class DiskRead:
    """Blocks that are set apart for what comes from disk, or from another engine; one of several sequences
    waits for them.
    """

    token: int
    # In the order of their tokens; `parent` is the content before the first.
    hashes: tuple[BlockHash, ...]
    block_ids: tuple[int, ...]
    parent: BlockHash | None
    # Of the state that is read with them: the block that it stands behind, and the slot; -1 without one.
    state_hash: BlockHash | None
    state_slot: int
    # Begins when no step up to this one is in flight: an earlier one may still write to what was given up.
    after_step_id: int
    # The engine that it comes from, and how long that may take, in seconds; None is the disk.
    source: BlockSource | None = None
    limit_s: float = 0.0
    is_begun: bool = False
    is_done: bool = False

    @property
    def wanted(self) -> tuple[tuple[BlockHash, int], ...]:
        """Contents and where they go: the state first, since the blocks are of little use without it."""
        blocks = tuple(zip(self.hashes, self.block_ids, strict=True))
        if self.state_hash is None:
            return blocks
        return ((state_name(self.state_hash), place_of(self.state_slot)), *blocks)
