"""What a model computes in one step: tensors on its device, or arrays where the native kernels compute.
Prefill, chunks, decode and verification differ only in their numbers.

Shape letters: T tokens of all sequences, rounded up to a multiple of 16 with rows that write to the spare
block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.adapters.rows import AdapterRows
from kernels.attention.ragged import RaggedBatch
from kernels.recurrent.rows import StateRows


@dataclass(frozen=True, kw_only=True)
class WindowBlocks:
    """Where layers with a window keep the step's blocks, in models whose other layers have none.

    Shape letters: S sequences, C blocks of the longest sequence.
    """

    slots: Any  # [T] int64, as in ForwardBatch
    block_tables: NDArray[np.int64]  # [S, C], as in RaggedBatch; anything behind a sequence's window


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """One step, as the model sees it."""

    token_ids: Any  # [T] int64
    positions: Any  # [T] int64, inside each sequence
    slots: Any  # [T] int64, block * block_size + place, where keys and values go
    ragged: RaggedBatch
    # None where all layers keep the same blocks.
    windows: WindowBlocks | None = None
    # Slots of the rows' adapters, -1 for the base model; None where all rows are that.
    adapters: NDArray[np.int64] | None = None  # [T]
    # The same as the native kernels take it, where another rank has sorted the rows.
    adapter_rows: AdapterRows | None = None
    # Where the sequences' states lie; None where the model has none.
    states: StateRows | None = None
    # Slots [M, 2] whose keys and values are copied, source to destination, in each layer between the write of
    # the step's own and attention; None where there are none.
    slot_copies: NDArray[np.int64] | None = None
    # Where each sequence's newest keys lie whole [S], of layers that round them by channel (kernels' Step);
    # and what of these is copied with `slot_copies` [M, 2].
    recent_rows: NDArray[np.int64] | None = None
    recent_copies: NDArray[np.int64] | None = None
