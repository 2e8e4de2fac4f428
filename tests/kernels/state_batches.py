"""Steps over slots of states, for tests of what computes from them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kernels.native.library import StepStruct
from kernels.recurrent.reference import StateStep
from kernels.recurrent.rows import StateRows

NAN = float("nan")
NUM_SLOTS = 9


@dataclass
class Batch:
    """Rows of several sequences in one step: tokens already taken in, and those of the step."""

    rows: list[tuple[int, int]]
    slots: list[int]
    # Of each row, (tokens that it holds, slot).
    snapshots: list[tuple[tuple[int, int], ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        starts, counts = np.array(self.rows, np.int64).T.copy()
        self.query_starts = np.concatenate(([0], np.cumsum(counts)))
        self.positions = np.concatenate(
            [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        )
        self.states = StateRows.of(
            np.array(self.slots, np.int64),
            starts,
            self.query_starts,
            self.snapshots or [() for _ in self.rows],
        )
        self.context_lens = starts + counts

    @property
    def num_tokens(self) -> int:
        return int(self.query_starts[-1])

    def reference(self) -> StateStep:
        return StateStep.of(self.states, self.query_starts, self.context_lens)

    def native(self) -> ctypes.Structure:
        arrays = {
            "positions": self.positions,
            "query_starts": self.query_starts,
            "state_slots": self.states.slots,
            "snapshot_starts": self.states.snapshot_starts,
            "snapshot_rows": self.states.snapshot_rows,
            "snapshot_slots": self.states.snapshot_slots,
        }
        pointers = {name: array.ctypes.data for name, array in arrays.items()}
        return StepStruct(num_tokens=self.num_tokens, num_sequences=len(self.rows), **pointers)


BATCH = Batch(
    rows=[(0, 5), (7, 1), (3, 17), (0, 1), (4, 2)],
    slots=[3, 0, 5, 1, 8],
    snapshots=[((4, 2),), (), ((8, 4), (20, 6)), (), ()],
)


def states_of(*sizes: int) -> Tensor:
    """Random states, with NaN where a sequence begins or a copy goes."""
    states = torch.randn(NUM_SLOTS, *sizes)
    states[[3, 1, 2, 4, 6]] = NAN
    return states
