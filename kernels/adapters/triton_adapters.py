"""What adapters add, in Triton: rows are sorted by their slot on the device, once for a step, and a tile has
one slot; so no row's result depends on others, and nothing waits for the host.

The way down to the rank has few outputs and many inputs: they are cut into pieces that programs of their own
sum, and the way up adds those sums from the first to the last.

Shape letters: T tokens, S slots, K inputs, N outputs, P parts, W width, C pieces of the inputs.
"""

from __future__ import annotations

from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.adapters.reference import TorchChanges
from kernels.linear.triton_rows import GroupedRows

# Inputs that one program sums, at least; and how many programs share a sum at most.
PIECE_INPUTS, MOST_PIECES = 512, 16
TILE_K, TILE_N = 64, 32
# Tile of float32: small, because without matrix instructions all of it must fit into registers.
TILE_OF_FLOATS = 16


# The number of rows changes from step to step; it must not decide what is compiled.
@triton.jit(do_not_specialize=["rows"])
def shrink_kernel(
    x,
    down,
    inner,
    order,
    slot_of_tile,
    rows,
    inputs,
    slots,
    piece,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """inner[c, t, w] of a tile of rows, a part and piece c of the inputs."""
    slot = tl.load(slot_of_tile + tl.program_id(0)).to(tl.int64)
    if (slot < 0) | (slot >= slots):
        return
    row = tl.load(order + tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    present = row >= 0
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    offset = tl.arange(0, TILE_K)
    total = tl.zeros([WIDTH, TILE_M], tl.float32)
    begin = tl.program_id(2) * piece
    for start in range(begin, tl.minimum(begin + piece, inputs), TILE_K):
        there = (start + offset < inputs)[None, :]
        at = x + row[:, None] * inputs + (start + offset)[None, :]
        some = tl.load(at, mask=present[:, None] & there, other=0.0)
        at = down + (slot * INNER + column)[:, None] * inputs + (start + offset)[None, :]
        weight = tl.load(at, mask=there, other=0.0).to(some.dtype)
        total = tl.dot(weight, tl.trans(some), total, input_precision="ieee")
    found = inner + (tl.program_id(2) * rows + row)[None, :] * INNER + column[:, None]
    tl.store(found, total, mask=present[None, :])


@triton.jit(do_not_specialize=["rows"])
def expand_kernel(
    inner,
    up,
    out,
    order,
    slot_of_tile,
    starts,
    tiles,
    rows,
    outputs,
    slots,
    PIECES: tl.constexpr,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Adds a tile of outputs, which has one part, to a tile of rows."""
    slot = tl.load(slot_of_tile + tl.program_id(0)).to(tl.int64)
    if (slot < 0) | (slot >= slots):
        return
    row = tl.load(order + tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    present = row >= 0
    part = tl.load(tiles + 2 * tl.program_id(1))
    column = tl.load(tiles + 2 * tl.program_id(1) + 1) + tl.arange(0, TILE_N)
    inside = column < tl.load(starts + part + 1)
    total = tl.zeros([TILE_N, TILE_M], tl.float32)
    for begin in range(0, WIDTH, TILE_K):
        rank = begin + tl.arange(0, TILE_K)
        change = tl.zeros([TILE_M, TILE_K], tl.float32)
        for index in range(PIECES):
            at = inner + (index * rows + row)[:, None] * INNER + (part * WIDTH + rank)[None, :]
            change += tl.load(at, mask=present[:, None], other=0.0)
        at = up + (slot * outputs + column)[:, None] * WIDTH + rank[None, :]
        weight = tl.load(at, mask=inside[:, None], other=0.0).to(tl.float32)
        total = tl.dot(weight, tl.trans(change), total, input_precision="ieee")
    at = out + row[None, :] * outputs + column[:, None]
    mask = present[None, :] & inside[:, None]
    total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=mask)


class TritonAdapterStep:
    """The rows of one step, sorted by slot. Of one shape it launches the same, whatever the slots: it can be
    captured.
    """

    def __init__(self, slots: Tensor, num_slots: int) -> None:
        """slots [T], negative for the base model: those rows meet one more weight, which is none."""
        choice = torch.where(slots < 0, num_slots, slots).to(torch.int32)
        self._groups = GroupedRows.of(choice, num_slots + 1)

    def add(self, changes: TorchChanges, x: Tensor, out: Tensor) -> Tensor:
        """x [T, K], out [T, N] -> out, in place, with what the rows' adapters add."""
        groups, (num_rows, inputs) = self._groups, x.shape
        if not num_rows:
            return out
        pieces = min(MOST_PIECES, triton.cdiv(inputs, PIECE_INPUTS))
        tile_k = TILE_OF_FLOATS if x.dtype == torch.float32 else TILE_K
        piece = triton.cdiv(triton.cdiv(inputs, pieces), TILE_K) * TILE_K
        pieces = triton.cdiv(inputs, piece)
        parts, inner_width = len(changes.sizes), changes.down.shape[1]
        inner = torch.empty(pieces, num_rows, inner_width, dtype=torch.float32, device=x.device)
        tiles = groups.weight_of_tile.shape[0]
        sizes = {"INNER": inner_width, "WIDTH": changes.width, "TILE_M": groups.tile, "num_warps": 4}
        shrink_kernel[(tiles, parts, pieces)](
            x.contiguous(),
            changes.down,
            inner,
            groups.order,
            groups.weight_of_tile,
            num_rows,
            inputs,
            changes.num_slots,
            piece,
            TILE_K=tile_k,
            **sizes,
        )
        starts, tile_table = output_tiles(changes.sizes, x.device)
        expand_kernel[(tiles, tile_table.shape[0])](
            inner,
            changes.up,
            out,
            groups.order,
            groups.weight_of_tile,
            starts,
            tile_table,
            num_rows,
            out.shape[1],
            changes.num_slots,
            PIECES=pieces,
            TILE_N=TILE_N,
            TILE_K=TILE_OF_FLOATS,
            **sizes,
        )
        return out


@cache
def output_tiles(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """First output of each part and the end [P + 1]; and the tiles [tiles, 2] of TILE_N outputs that they are
    cut into, each with its part and first output. int32, made before anything is captured.
    """
    starts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    tiles = [
        (part, first) for part in range(len(sizes)) for first in range(starts[part], starts[part + 1], TILE_N)
    ]
    make = partial(torch.tensor, dtype=torch.int32, device=device)
    return make(starts), make(tiles)
