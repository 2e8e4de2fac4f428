"""The blocks of one sequence, in the order of its tokens."""

from __future__ import annotations


class BlockTable:
    """Block i holds positions [i * block_size, (i + 1) * block_size). Changed by KvCache alone."""

    __slots__ = ("block_ids", "num_registered", "num_sent")

    def __init__(self) -> None:
        self.block_ids: list[int] = []
        # Leading blocks that were offered to the prefix cache already.
        self.num_registered = 0
        # Leading blocks that the runner knows of.
        self.num_sent = 0

    def __len__(self) -> int:
        return len(self.block_ids)

    def take_unsent(self) -> tuple[int, ...]:
        """Blocks appended since the runner was last told, and from now on counted as told."""
        unsent = tuple(self.block_ids[self.num_sent :])
        self.num_sent = len(self.block_ids)
        return unsent
