"""Products of rows with the dense weights that each of them chose, in Triton: experts.

Shape letters: M rows of inputs, R rows of outputs, K inputs, N outputs, X experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation.triton_activation import KINDS
from kernels.linear.triton_rows import GroupedRows
from kernels.linear.triton_shapes import TileShape, grid_of, launch, shape_for
from kernels.linear.triton_tiles import outputs_of_tile, rows_of_tile, store_tile

# Inputs of two bytes, and of four.
TILE_K, WIDE_TILE_K = 64, 32


@triton.jit
def grouped_kernel(
    x,
    weights,
    bias,
    out,
    order,
    weight_of_tile,
    inputs,
    outputs,
    rows_per_input,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Tile t of rows times weights[weight_of_tile[t]]. Row r of the order reads x[r // rows_per_input]."""
    chosen = tl.load(weight_of_tile + tl.program_id(0)).to(tl.int64)
    if chosen < 0:
        return
    row, present = rows_of_tile(order, 0, True, TILE_M)
    output = chosen * outputs + outputs_of_tile(outputs, GATE >= 0, TILE_N)
    offset = tl.arange(0, TILE_K)
    total = tl.zeros([TILE_N, TILE_M], tl.float32)
    for start in range(0, inputs, TILE_K):
        there = (start + offset < inputs)[None, :]
        at = x + (row // rows_per_input)[:, None] * inputs + (start + offset)[None, :]
        some = tl.load(at, mask=present[:, None] & there, other=0.0)
        other = tl.load(weights + output[:, None] * inputs + (start + offset)[None, :], mask=there, other=0.0)
        total = tl.dot(other.to(some.dtype), tl.trans(some), total, input_precision="ieee")
    store_tile(total, bias, out, row, present, output, outputs, BIAS, GATE, TILE_M, TILE_N)


def grouped_product(
    x: Tensor,
    weights: Tensor,
    groups: GroupedRows,
    *,
    rows_per_input: int = 1,
    bias: Tensor | None = None,
    gate: str | None = None,
) -> Tensor:
    """x [M, K], weights [X, N, K], bias [X * N] -> [R, N], or with a gate [R, N / 2]; row r is
    x[r // rows_per_input] times its weight.
    """
    outputs, inputs = weights.shape[1:]
    width = outputs // (1 + (gate is not None))
    out = torch.empty(groups.num_rows, width, dtype=x.dtype, device=x.device)
    wide = x.element_size() > 2

    def start(shape: TileShape) -> None:
        grouped_kernel[grid_of(shape, groups.num_rows, width, groups, 1, gate)](
            x,
            weights,
            bias if bias is not None else weights,
            out,
            groups.order,
            groups.weight_of_tile,
            inputs,
            outputs,
            rows_per_input,
            BIAS=bias is not None,
            GATE=KINDS[gate] if gate is not None else -1,
            TILE_M=shape.rows,
            TILE_N=shape.outputs,
            TILE_K=WIDE_TILE_K if wide else TILE_K,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )

    if groups.num_rows:
        launch("dense experts", shape_for(groups.num_rows, groups, wide=wide), start)
    return out
