"""The blocks of one sequence, in the order of its tokens.

Where every layer has a sliding window, leading blocks that lie before it are given up: the table keeps its
length, and names the spare block (whose id is the number of blocks) in their places.
"""

from __future__ import annotations


class BlockTable:
    """Block i holds positions [i * block_size, (i + 1) * block_size). Changed by KvCache alone."""

    __slots__ = ("block_ids", "num_given_up", "num_given_up_sent", "num_registered", "num_sent")

    def __init__(self) -> None:
        self.block_ids: list[int] = []
        # Leading blocks that were offered to the prefix cache already.
        self.num_registered = 0
        # Leading blocks that the runner knows of.
        self.num_sent = 0
        # Leading blocks without a reference, and as many of them as the runner knows of.
        self.num_given_up = 0
        self.num_given_up_sent = 0

    def __len__(self) -> int:
        return len(self.block_ids)

    @property
    def held(self) -> list[int]:
        """Blocks that the sequence has a reference to."""
        return self.block_ids[self.num_given_up :]

    @property
    def num_held(self) -> int:
        """Number of these."""
        return len(self.block_ids) - self.num_given_up

    def take_given_up(self) -> int:
        """Leading blocks given up, once after each change and then 0."""
        if self.num_given_up == self.num_given_up_sent:
            return 0
        self.num_given_up_sent = self.num_given_up
        return self.num_given_up

    def take_unsent(self) -> tuple[int, ...]:
        """Blocks appended since the runner was last told, and from now on counted as told."""
        unsent = tuple(self.block_ids[self.num_sent :])
        self.num_sent = len(self.block_ids)
        return unsent
