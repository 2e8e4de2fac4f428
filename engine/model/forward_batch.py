"""The device tensors of one step. Prefill, chunks, decode and verification differ only in their numbers.

Shape letters: T tokens of all sequences, rounded up to a multiple of 16 with rows that write to the spare
block.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.kernels.attention import RaggedBatch


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """One step, as the model sees it."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, inside each sequence
    slots: Tensor  # [T] int64, block * block_size + place, where keys and values go
    ragged: RaggedBatch
