"""Products with dense weights whose rows have the same bits in any batch, in Triton.

Libraries choose a kernel by the number of rows; this one has one tile for all numbers of rows, and adds along
K in one order. A row's result is a function of the row and the weight.

Shape letters: B batch, M rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_M, TILE_N, TILE_K = 64, 128, 64
NUM_WARPS = 8
# Tiles of float32, half as wide because its numbers are twice as large.
WIDE_TILE_N, WIDE_TILE_K = 64, 32
# Programs of neighbouring rows share the columns of a weight while it is in the cache.
ROWS_TOGETHER = 8


# The number of rows changes from step to step; it must not decide what is compiled.
@triton.jit(do_not_specialize=["rows", "x_batch", "out_batch"])
def dense_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    inputs,
    outputs,
    x_batch,
    x_row,
    weight_batch,
    weight_output,
    weight_input,
    out_batch,
    out_row,
    BIAS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_M: tl.constexpr = TILE_M,
    TOGETHER: tl.constexpr = ROWS_TOGETHER,
):
    """x [B, M, K] times weight [B, N, K] by its strides; elements of a row of x and out lie side by side."""
    batch = tl.program_id(1).to(tl.int64)
    row_tiles, column_tiles = tl.cdiv(rows, TILE_M), tl.cdiv(outputs, TILE_N)
    # TOGETHER tiles of rows, then the next tile of columns.
    strip = tl.program_id(0) // (TOGETHER * column_tiles)
    height = tl.minimum(row_tiles - strip * TOGETHER, TOGETHER)
    within = tl.program_id(0) % (TOGETHER * column_tiles)
    row = (strip * TOGETHER + within % height) * TILE_M + tl.arange(0, TILE_M)
    column = within // height * TILE_N + tl.arange(0, TILE_N)
    offset = tl.arange(0, TILE_K)
    in_rows, in_columns = row < rows, column < outputs
    row, column = row.to(tl.int64), column.to(tl.int64)
    x_at = x + batch * x_batch + row[:, None] * x_row + offset[None, :]
    weight_at = (
        weight + batch * weight_batch + column[:, None] * weight_output + offset[None, :] * weight_input
    )
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, inputs, TILE_K):
        there = (start + offset < inputs)[None, :]
        some = tl.load(x_at + start, mask=in_rows[:, None] & there, other=0.0)
        other = tl.load(weight_at + start * weight_input, mask=in_columns[:, None] & there, other=0.0)
        total = tl.dot(some, tl.trans(other), total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    at = out + batch * out_batch + row[:, None] * out_row + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


def dense_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K] (rows may be apart), weight [N, K], bias [N] -> [M, N] in x's type."""
    return _product(x[None], weight[None], bias)[0]


def dense_batched_product(left: Tensor, right: Tensor) -> Tensor:
    """left [B, M, K], right [B, K, N] -> [B, M, N] in left's type."""
    return _product(left, right.transpose(1, 2), None)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [B, M, K], weight [B, N, K] -> [B, M, N]."""
    batch, rows, inputs = x.shape
    outputs = weight.shape[1]
    if inputs > 1 and x.stride(2) != 1:
        x = x.contiguous()
    out = torch.empty(batch, rows, outputs, dtype=x.dtype, device=x.device)
    wide = x.element_size() > 2
    tile_n, tile_k = (WIDE_TILE_N, WIDE_TILE_K) if wide else (TILE_N, TILE_K)
    if rows and batch:
        dense_kernel[(triton.cdiv(rows, TILE_M) * triton.cdiv(outputs, tile_n), batch)](
            x,
            weight,
            bias if bias is not None else weight,
            out,
            rows,
            inputs,
            outputs,
            x.stride(0),
            x.stride(1),
            weight.stride(0),
            weight.stride(1),
            weight.stride(2),
            out.stride(0),
            out.stride(1),
            BIAS=bias is not None,
            TILE_N=tile_n,
            TILE_K=tile_k,
            num_warps=NUM_WARPS,
        )
    return out
