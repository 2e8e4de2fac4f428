"""Random adapters in slots, and what they add by the formula: for the tests of every back end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.adapters.low_rank import LowRankChange
from kernels.adapters.rows import NO_ADAPTER

# Inputs, outputs of the parts, ranks of each slot's parts (0 is left alone).
SHAPES = {
    "q, k and v": (96, (64, 32, 32), ((4, 4, 4), (16, 0, 5), (0, 7, 0))),
    "odd": (63, (37,), ((1,), (13,), (16,))),
    "wide": (700, (130, 70), ((64, 64), (33, 8), (0, 0))),
}


class Slots(Protocol):
    """A back end's changes of one layer."""

    def put(self, slot: int, parts: Sequence[LowRankChange | None]) -> None: ...


def fill(slots: Slots, name: str) -> list[list[LowRankChange | None]]:
    """Draws adapters into all slots, in their order."""
    inputs, sizes, ranks = SHAPES[name]
    random = np.random.default_rng(7)
    drawn: list[list[LowRankChange | None]] = []
    for slot, of_parts in enumerate(ranks):
        parts: list[LowRankChange | None] = [
            LowRankChange(
                down=random.standard_normal((rank, inputs)).astype(np.float32),
                up=random.standard_normal((size, rank)).astype(np.float32),
            )
            if rank
            else None
            for size, rank in zip(sizes, of_parts, strict=True)
        ]
        slots.put(slot, parts)
        drawn.append(parts)
    return drawn


def expected(
    drawn: list[list[LowRankChange | None]],
    x: NDArray[np.float32],
    out: NDArray[np.float32],
    slots: Sequence[int],
) -> NDArray[np.float64]:
    """out [T, N] with what the adapters of x [T, K] add, in float64."""
    total = out.astype(np.float64)
    for row, slot in enumerate(slots):
        begin = 0
        for change, size in zip(drawn[slot], sizes_of(drawn), strict=True) if slot != NO_ADAPTER else ():
            if change is not None:
                inner = change.down.astype(np.float64) @ x[row].astype(np.float64)
                total[row, begin : begin + size] += change.up.astype(np.float64) @ inner
            begin += size
    return total


def sizes_of(drawn: list[list[LowRankChange | None]]) -> tuple[int, ...]:
    """Outputs of the parts."""
    return next(
        sizes
        for _, sizes, ranks in SHAPES.values()
        if ranks == tuple(tuple(0 if part is None else part.rank for part in parts) for parts in drawn)
    )


def some_rows(name: str, count: int) -> tuple[NDArray[np.float32], NDArray[np.float32], list[int]]:
    """x, out and the rows' slots: every slot and the base model, mixed."""
    inputs, sizes, _ = SHAPES[name]
    random = np.random.default_rng(11)
    x = random.standard_normal((count, inputs)).astype(np.float32)
    out = random.standard_normal((count, sum(sizes))).astype(np.float32)
    return x, out, random.integers(NO_ADAPTER, 3, count).tolist()
