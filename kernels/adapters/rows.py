"""Which rows of a step have an adapter, in blocks as the native kernels take them (adapters.h).

Shape letters: T tokens, A rows with an adapter, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Slot of a row that is the base model's alone.
NO_ADAPTER = -1
# Rows of a block at most (kAdapterRows).
BLOCK_ROWS = 8


@dataclass(frozen=True)
class AdapterRows:
    """Rows of one adapter lie together, in blocks of at most BLOCK_ROWS."""

    rows: NDArray[np.int64]  # [A]
    blocks: NDArray[np.int64]  # [B, 3] first index in rows, number of rows, slot

    @classmethod
    def of(cls, slots: NDArray[np.int64]) -> AdapterRows | None:
        """Of slots [T], NO_ADAPTER for the base model; None where all rows are that."""
        (having,) = np.nonzero(slots != NO_ADAPTER)
        if not having.size:
            return None
        order = np.argsort(slots[having], kind="stable")
        rows = np.ascontiguousarray(having[order], np.int64)
        found, first, count = np.unique(slots[rows], return_index=True, return_counts=True)
        num_blocks = -(-count // BLOCK_ROWS)
        owner = np.repeat(np.arange(found.size), num_blocks)
        offset = np.arange(owner.size) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)
        blocks = np.empty((owner.size, 3), np.int64)
        blocks[:, 0] = first[owner] + offset * BLOCK_ROWS
        blocks[:, 1] = np.minimum(count[owner] - offset * BLOCK_ROWS, BLOCK_ROWS)
        blocks[:, 2] = found[owner]
        return cls(rows, blocks)
