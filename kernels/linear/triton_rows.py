"""Rows that each chose one of several weights, sorted on the device for kernels of tiles.

Nothing waits for the host, and as a tile has one weight, no row's result depends on others. One launch, or
two for many rows: programs count what their rows chose, and then each finds offsets for its own.

Shape letters: R rows, X weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Most rows for each weight, on average, to the rows of a tile.
TILES = ((8, 16), (16, 32))
LARGEST_TILE = 64
# Rows that a program sorts where there are several, at least; and how many programs there are at most.
PROGRAM_ROWS, MOST_PROGRAMS = 256, 64
# Rows times weights that a program compares at once.
COMPARED = 8192
LARGEST_PIECE = 64


@dataclass(frozen=True, kw_only=True)
class GroupedRows:
    """Rows sorted by the weight that they meet, cut into tiles of `tile` that have one weight each."""

    order: Tensor  # [tiles * tile] int32, row in the input; -1 fills up a tile, rest where there is no weight
    weight_of_tile: Tensor  # [tiles] int32; -1 is no weight (and no product)
    num_rows: int
    tile: int

    @classmethod
    def of(cls, choice: Tensor, num_weights: int) -> GroupedRows:
        """choice [R] int32: which weight row r meets. No synchronization with the host: the number of tiles
        is the most that there can be.
        """
        device, num_rows = choice.device, choice.shape[0]
        tile = next((size for most, size in TILES if num_rows <= most * num_weights), LARGEST_TILE)
        tiles = num_rows // tile + min(num_weights, num_rows)
        order = torch.empty(tiles * tile, dtype=torch.int32, device=device)
        weight_of_tile = torch.empty(tiles, dtype=torch.int32, device=device)
        weights = triton.next_power_of_2(num_weights)
        piece = max(1, min(LARGEST_PIECE, COMPARED // weights))
        programs = min(MOST_PROGRAMS, triton.cdiv(num_rows, PROGRAM_ROWS))
        each = triton.cdiv(triton.cdiv(num_rows, max(programs, 1)), piece) * piece
        counts = torch.empty(max(programs, 1), weights, dtype=torch.int32, device=device)
        sizes = {"WEIGHTS": weights, "PIECE": piece, "num_warps": 8}
        if programs > 1:
            count_rows_kernel[(programs,)](choice, counts, num_rows, each, **sizes)
        if programs:
            place_rows_kernel[(programs,)](
                choice,
                counts,
                order,
                weight_of_tile,
                num_rows,
                tiles,
                each,
                TILE_M=tile,
                ALONE=programs == 1,
                **sizes,
            )
        return cls(order=order, weight_of_tile=weight_of_tile, num_rows=num_rows, tile=tile)


@triton.jit
def _choices(choice, first, end, WEIGHTS: tl.constexpr, PIECE: tl.constexpr):
    """Rows [PIECE] from first on, whether each is before end, what it chose, and that as [PIECE, WEIGHTS] of
    zeros and ones.
    """
    row = first + tl.arange(0, PIECE)
    chosen = tl.load(choice + row, mask=row < end, other=-1)
    return row, row < end, chosen, (chosen[:, None] == tl.arange(0, WEIGHTS)[None, :]).to(tl.int32)


@triton.jit
def _count(choice, begin, end, WEIGHTS: tl.constexpr, PIECE: tl.constexpr):
    """How many of rows [begin, end) chose each weight [WEIGHTS]."""
    total = tl.zeros([WEIGHTS], tl.int32)
    for first in range(begin, end, PIECE):
        _, _, _, met = _choices(choice, first, end, WEIGHTS, PIECE)
        total += tl.sum(met, axis=0)
    return total


# The number of rows changes from step to step; it must not decide what is compiled.
@triton.jit(do_not_specialize=["rows", "each"])
def count_rows_kernel(choice, counts, rows, each, WEIGHTS: tl.constexpr, PIECE: tl.constexpr):
    """One program for `each` rows: counts [programs, WEIGHTS] of what they chose."""
    begin = tl.program_id(0) * each
    total = _count(choice, begin, tl.minimum(begin + each, rows), WEIGHTS, PIECE)
    tl.store(counts + tl.program_id(0) * WEIGHTS + tl.arange(0, WEIGHTS), total)


@triton.jit
def _counted(counts, program, WEIGHTS: tl.constexpr):
    """How many rows of all programs chose each weight, and how many of those before `program`."""
    total, before = tl.zeros([WEIGHTS], tl.int32), tl.zeros([WEIGHTS], tl.int32)
    for other in range(tl.num_programs(0)):
        count = tl.load(counts + other * WEIGHTS + tl.arange(0, WEIGHTS))
        total += count
        before += tl.where(other < program, count, 0)
    return total, before


@triton.jit
def _list_tiles(weight_of_tile, ends, tiles, PIECE: tl.constexpr):
    """This program's share of weight_of_tile, where tiles of weight w end before ends[w]."""
    last = tl.max(ends, axis=0)
    for first in range(tl.program_id(0) * PIECE, tiles, tl.num_programs(0) * PIECE):
        tile = first + tl.arange(0, PIECE)
        found = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), axis=1)
        tl.store(weight_of_tile + tile, tl.where(tile < last, found, -1), mask=tile < tiles)


@triton.jit(do_not_specialize=["rows", "tiles", "each"])
def place_rows_kernel(
    choice,
    counts,
    order,
    weight_of_tile,
    rows,
    tiles,
    each,
    WEIGHTS: tl.constexpr,
    PIECE: tl.constexpr,
    TILE_M: tl.constexpr,
    ALONE: tl.constexpr,
):
    """One program for `each` rows: their places in `order`, first come first placed, and its share of
    weight_of_tile; the first one fills up tiles. ALONE: nobody has counted.
    """
    program = tl.program_id(0)
    begin = program * each
    end = tl.minimum(begin + each, rows)
    if ALONE:
        total, before = _count(choice, begin, end, WEIGHTS, PIECE), tl.zeros([WEIGHTS], tl.int32)
    else:
        total, before = _counted(counts, program, WEIGHTS)
    needed = (total + TILE_M - 1) // TILE_M
    ends = tl.cumsum(needed, axis=0)
    base = (ends - needed) * TILE_M
    if program == 0:
        rest = tl.arange(0, TILE_M)[None, :]
        empty = total[:, None] + rest < (needed * TILE_M)[:, None]
        tl.store(order + (base + total)[:, None] + rest, -1, mask=empty)
    following = base + before
    earlier = tl.arange(0, PIECE)[:, None] > tl.arange(0, PIECE)[None, :]
    for first in range(begin, end, PIECE):
        row, there, chosen, met = _choices(choice, first, end, WEIGHTS, PIECE)
        rank = tl.sum(((chosen[:, None] == chosen[None, :]) & earlier).to(tl.int32), axis=1)
        offset = tl.sum(met * following[None, :], axis=1) + rank
        tl.store(order + offset, row, mask=there)
        following += tl.sum(met, axis=0)
    _list_tiles(weight_of_tile, ends, tiles, PIECE)
