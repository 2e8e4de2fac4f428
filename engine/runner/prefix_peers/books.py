"""The two state machines of a hand-over, as plain bookkeeping: what is pulled here, what is held for others.

Whoever uses them has a lock; the model check of the tests walks them without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from contract.prefix import BlockHash

Blocks = Sequence[tuple[BlockHash, int]]


@dataclass(slots=True)
class _Pull:
    blocks: Blocks
    begun_s: float
    num_filled: int = 0
    # A block is being written; what ends the pull meanwhile takes effect after it.
    is_writing: bool = False
    ends: bool = False


class Pulls:
    """Pulls that are under way. A block may be written from `next_block` to `written`, and never else."""

    def __init__(self) -> None:
        self._pulls: dict[int, _Pull] = {}
        self._finished: list[tuple[int, int]] = []
        self.num_ended = 0
        self.seconds = 0.0

    def __contains__(self, token: int) -> bool:
        return token in self._pulls

    def begin(self, token: int, blocks: Blocks, now: float) -> None:
        """These blocks are set apart for the contents until the token is finished."""
        self._pulls[token] = _Pull(blocks, now)

    def next_block(self, token: int, index: int) -> tuple[BlockHash, int] | None:
        """(content, block) to write what has come to; None for what nobody waits for, or came out of turn."""
        pull = self._pulls.get(token)
        if pull is None or pull.is_writing or pull.ends or index != pull.num_filled:
            return None
        pull.is_writing = True
        return pull.blocks[index]

    def written(self, token: int, now: float, *, is_whole: bool) -> None:
        """The block that `next_block` gave is written, or its content was not what it should be: then the
        pull has ended.
        """
        pull = self._pulls[token]
        pull.is_writing = False
        pull.num_filled += is_whole
        if pull.ends or not is_whole or pull.num_filled == len(pull.blocks):
            self._finish(token, now)

    def end(self, token: int, now: float) -> bool:
        """Nothing more is written, after the write that is under way; False where the pull had ended."""
        pull = self._pulls.get(token)
        if pull is None or pull.ends:
            return False
        pull.ends = True
        if not pull.is_writing:
            self._finish(token, now)
        return True

    def finished(self) -> list[tuple[int, int]]:
        """Tokens of pulls that have ended since the last call, each with how many first blocks are filled."""
        found, self._finished = self._finished, []
        return found

    def _finish(self, token: int, now: float) -> None:
        pull = self._pulls.pop(token)
        self._finished.append((token, pull.num_filled))
        self.num_ended += 1
        self.seconds += now - pull.begun_s


class Held:
    """Blocks by ticket and content, as long as they may be read for others."""

    def __init__(self) -> None:
        self._held: dict[bytes, dict[BlockHash, int]] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks of all tickets."""
        return sum(map(len, self._held.values()))

    def offer(self, ticket: bytes, blocks: Blocks) -> None:
        """The blocks hold these contents until `withdraw`."""
        self._held[ticket] = dict(blocks)

    def withdraw(self, ticket: bytes) -> None:
        """The blocks may get other content from now on."""
        self._held.pop(ticket, None)

    def find(self, ticket: bytes, block_hash: BlockHash) -> int | None:
        """The block of a content. What was read of it counts only if it is found again afterwards."""
        return self._held.get(ticket, {}).get(block_hash)
