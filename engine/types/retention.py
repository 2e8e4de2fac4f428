"""Which blocks the positions of an answer look at that may forget some, in numbers of blocks.

A prompt is computed whole: its positions look at everything before them. A position of the answer looks at
the first block, whose tokens take what attention has to spare (sinks, arXiv 2309.17453), and at the last
ones, its own among them. That is a function of the position alone, so an answer is the same however it was
cut into steps, preempted or continued elsewhere; and keys stay where they were rotated to.
"""

from __future__ import annotations

import msgspec

from contract.retention import Retention

_NUM_SINKS = 1
# The one that is written to, and one that is whole.
_LEAST_RECENT = 2
# Of an answer that is measured: blocks whose keys stay in eight bits, and boxes around those of earlier ones,
# none of which is larger than such a block (engine/runner/forgotten/keys).
MOST_WHOLE_BLOCKS = 512
MOST_BOXES = 256
# Blocks that two steps may take before the first of them gives any back.
_IN_FLIGHT = 2


class KeptBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Of one sequence. The first `num_sinks` and the last `num_recent` blocks, from position `start` on."""

    num_sinks: int
    num_recent: int
    # Before it nothing is hidden: behind the prompt, and where more blocks are there than are kept.
    start: int
    block_size: int
    # Whether it is said what that loses.
    is_measured: bool = False

    @classmethod
    def of(cls, asked: Retention | None, num_prompt_tokens: int, block_size: int) -> KeptBlocks | None:
        """What a request's prompt makes of what it asks for; None where nothing is ever forgotten."""
        if asked is None or not asked.forgets:
            return None
        num_blocks = -(-asked.tokens_of(num_prompt_tokens) // block_size)
        num_recent = max(_LEAST_RECENT, num_blocks - _NUM_SINKS)
        start = max(num_prompt_tokens, (_NUM_SINKS + num_recent) * block_size)
        return cls(_NUM_SINKS, num_recent, start, block_size, asked.max_lost is not None)

    def num_hidden(self, position: int) -> int:
        """Blocks behind the sinks that a position does not look at."""
        if position < self.start:
            return 0
        return position // self.block_size + 1 - self.num_recent - self.num_sinks

    def num_measured(self, num_tokens: int) -> int:
        """Forgotten blocks of a sequence of so many tokens of which keys stay, at most."""
        if not self.is_measured:
            return 0
        return min(max(0, self.num_hidden(num_tokens - 1)), MOST_WHOLE_BLOCKS + MOST_BOXES)

    def first_recent(self, position: int) -> int:
        """The first block behind those."""
        return self.num_sinks + self.num_hidden(position)

    def alike_until(self, position: int) -> int:
        """Where the positions end that look at the same blocks as this one, those behind it left out."""
        if position < self.start:
            return self.start
        return (position // self.block_size + 1) * self.block_size

    @property
    def first_own(self) -> int:
        """The first block that no other sequence ever has: what comes before was computed like any prompt."""
        return self.start // self.block_size

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens takes before any is sure to come free: those of its prompt
        may be others' as well.
        """
        whole = -(-num_tokens // self.block_size)
        return min(whole, -(-self.start // self.block_size) + self.num_recent + _IN_FLIGHT)

    def num_to_come(self, num_blocks: int, num_own: int, num_tokens: int) -> int:
        """Blocks that a sequence may still come to need that has a table of `num_blocks`, of which it holds
        `num_own` from `first_own` on, and ends with `num_tokens`. Others may hold those before.
        """
        growth = max(0, -(-num_tokens // self.block_size) - num_blocks)
        until_start = max(0, -(-self.start // self.block_size) - num_blocks)
        return min(growth, until_start + max(0, self.num_recent + _IN_FLIGHT - num_own))
