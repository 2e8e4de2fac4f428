"""What the cache asks of a disk that keeps blocks beyond the life of the process, and what is being read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from contract.prefix import BlockHash
from engine.types import DiskCounters


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
    """Blocks that are set apart for what comes from disk; one of several sequences waits for them."""

    token: int
    # In the order of their tokens; `parent` is the content before the first.
    hashes: tuple[BlockHash, ...]
    block_ids: tuple[int, ...]
    parent: BlockHash | None
    # Begins when no step up to this one is in flight: an earlier one may still write to what was given up.
    after_step_id: int
    is_begun: bool = False
    is_done: bool = False
