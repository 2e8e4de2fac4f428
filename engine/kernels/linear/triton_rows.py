"""Rows that each chose one of several weights, sorted on the device for kernels of tiles.

Nothing waits for the host, and as a tile has one weight, no row's result depends on others.

Shape letters: R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_M = 64


@dataclass(frozen=True, kw_only=True)
class GroupedRows:
    """Rows sorted by the weight that they meet, cut into tiles of TILE_M that have one weight each."""

    order: Tensor  # [tiles * TILE_M] int32, row in the input; -1 fills up
    weight_of_tile: Tensor  # [tiles] int32; -1 is no weight (and no product)
    num_rows: int

    @classmethod
    def of(cls, choice: Tensor, num_weights: int) -> GroupedRows:
        """choice [R] int32: which weight row r meets. No synchronization with the host: the number of tiles
        is the most that there can be.
        """
        device, num_rows = choice.device, choice.shape[0]
        tiles = num_rows // TILE_M + min(num_weights, num_rows)
        counts = torch.zeros(num_weights, dtype=torch.int64, device=device)
        counts.scatter_add_(0, choice.long(), torch.ones_like(choice, dtype=torch.int64))
        padded = (counts + TILE_M - 1) // TILE_M * TILE_M
        ends = padded.cumsum(0)
        by_weight = torch.argsort(choice, stable=True)
        within = torch.arange(num_rows, device=device) - (counts.cumsum(0) - counts)[choice[by_weight]]
        place = (ends - padded)[choice[by_weight]] + within
        order = torch.full((tiles * TILE_M,), -1, dtype=torch.int32, device=device)
        order.scatter_(0, place, by_weight.int())
        firsts = torch.arange(tiles, device=device) * TILE_M
        weight_of_tile = torch.searchsorted(ends, firsts, right=True).int()
        weight_of_tile = torch.where(firsts < ends[-1], weight_of_tile, -1)
        return cls(order=order, weight_of_tile=weight_of_tile, num_rows=num_rows)


@triton.jit
def rows_of_tile(order, rows, GROUPED: tl.constexpr, TILE_M: tl.constexpr):
    """Rows [TILE_M] of this program's tile, and which of them there are."""
    place = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    if GROUPED:
        place = tl.load(order + place)
        present = place >= 0
        row = tl.where(present, place, 0).to(tl.int64)
    else:
        present = place < rows
        row = place.to(tl.int64)
    return row, present
