"""What the kernels of products share: which rows and outputs a program computes, how parts of its sum are put
together, and what is done to a finished tile. Tiles are [outputs, rows]: see triton_shapes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.activation.triton_activation import gated


@triton.jit
def rows_of_tile(order, rows, GROUPED: tl.constexpr, TILE_M: tl.constexpr):
    """Rows [TILE_M] of this program's tile, and which of them there are."""
    offset = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    if GROUPED:
        offset = tl.load(order + offset)
        present = offset >= 0
        row = tl.where(present, offset, 0).to(tl.int64)
    else:
        present = offset < rows
        row = offset.to(tl.int64)
    return row, present


@triton.jit
def outputs_of_tile(outputs, GATED: tl.constexpr, TILE_N: tl.constexpr):
    """Outputs [TILE_N] of this program's tile, int64; beyond the last it stands again. GATED: half of them
    are gates, and the others what these are for.
    """
    offset = tl.arange(0, TILE_N)
    if GATED:
        HALF: tl.constexpr = TILE_N // 2
        size = outputs // 2
        column = tl.minimum(tl.program_id(1) * HALF + offset % HALF, size - 1) + offset // HALF * size
    else:
        column = tl.minimum(tl.program_id(1) * TILE_N + offset, outputs - 1)
    return column.to(tl.int64)


@triton.jit
def leave_part(part, sums, arrived, in_rows, PARTS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Leaves program_id(2)'s part of a tile for the last program of the tile; whether this is that one."""
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    offset = tl.arange(0, TILE_M)[None, :] * TILE_N + tl.arange(0, TILE_N)[:, None]
    at = sums + (tile * PARTS + tl.program_id(2)).to(tl.int64) * (TILE_M * TILE_N) + offset
    tl.store(at, part, mask=in_rows[None, :])
    # All of the program's threads have stored before one of them says so.
    tl.debug_barrier()
    return tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == PARTS - 1


@triton.jit
def sum_of_parts(sums, arrived, in_rows, PARTS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """The parts of a tile from the first to the last, once all were left; nothing has arrived any more."""
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(arrived + tile, 0)
    offset = tl.arange(0, TILE_M)[None, :] * TILE_N + tl.arange(0, TILE_N)[:, None]
    at = sums + tile.to(tl.int64) * (PARTS * TILE_M * TILE_N) + offset
    total = tl.zeros([TILE_N, TILE_M], sums.dtype.element_ty)
    for part in tl.static_range(PARTS):
        there = at + part * (TILE_M * TILE_N)
        # From where all processors see the same.
        total += tl.load(there, mask=in_rows[None, :], other=0, cache_modifier=".cg")
    return total


@triton.jit
def store_tile(
    total,
    bias,
    out,
    row,
    in_rows,
    output,
    outputs,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Stores total [TILE_N, TILE_M] float32, plus bias[output], in rows of out [., outputs]; with a GATE (a
    number of triton_activation.KINDS) the gated halves, in rows of half as many.
    """
    if BIAS:
        total += tl.load(bias + output).to(tl.float32)[:, None]
    WIDTH: tl.constexpr = TILE_N // 2 if GATE >= 0 else TILE_N
    if GATE >= 0:
        halves = tl.permute(tl.reshape(total, (2, WIDTH, TILE_M)), (1, 2, 0))
        gate, up = tl.split(halves)
        result, size = gated(gate, up, GATE), outputs // 2
    else:
        result, size = total, outputs
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    at = out + row[None, :] * size + column[:, None]
    tl.store(at, result.to(out.dtype.element_ty), mask=in_rows[None, :] & (column < size)[:, None])
