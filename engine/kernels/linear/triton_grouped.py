"""Products of rows with the dense weights that each of them chose, in Triton: experts.

Shape letters: M rows of inputs, R rows of outputs, K inputs, N outputs, X experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.linear.triton_linear import TILE_K, TILE_N
from engine.kernels.linear.triton_rows import TILE_M, GroupedRows, rows_of_tile


@triton.jit
def grouped_kernel(
    x,
    weights,
    out,
    order,
    weight_of_tile,
    inputs,
    outputs,
    rows_per_input,
    TILE_M: tl.constexpr = TILE_M,
    TILE_N: tl.constexpr = TILE_N,
    TILE_K: tl.constexpr = TILE_K,
):
    """Tile t of rows times weights[weight_of_tile[t]]. Row r of the order reads x[r // rows_per_input]."""
    chosen = tl.load(weight_of_tile + tl.program_id(0)).to(tl.int64)
    if chosen < 0:
        return
    row, present = rows_of_tile(order, 0, True, TILE_M)
    column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    in_columns = column < outputs
    place = tl.arange(0, TILE_K)
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, inputs, TILE_K):
        there = start + place < inputs
        at = x + (row // rows_per_input)[:, None] * inputs + (start + place)[None, :]
        some = tl.load(at, mask=present[:, None] & there[None, :], other=0.0)
        at = weights + (chosen * outputs + column)[:, None] * inputs + (start + place)[None, :]
        other = tl.load(at, mask=in_columns[:, None] & there[None, :], other=0.0)
        total = tl.dot(some, tl.trans(other).to(some.dtype), total, input_precision="ieee")
    at = out + row[:, None] * outputs + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=present[:, None] & in_columns[None, :])


def grouped_product(x: Tensor, weights: Tensor, groups: GroupedRows, *, rows_per_input: int = 1) -> Tensor:
    """x [M, K], weights [X, N, K] -> [R, N], row r being x[r // rows_per_input] times its weight:
    experts with rows_per_input = active experts per token on the way in, and 1 on the way out.
    """
    outputs, inputs = weights.shape[1:]
    out = torch.empty(groups.num_rows, outputs, dtype=x.dtype, device=x.device)
    tiles = groups.weight_of_tile.shape[0]
    if tiles:
        grouped_kernel[(tiles, triton.cdiv(outputs, TILE_N))](
            x,
            weights,
            out,
            groups.order,
            groups.weight_of_tile,
            inputs,
            outputs,
            rows_per_input,
        )
    return out
