"""Products of rows with the weights that each of them chose, in Triton: experts and adapters.

Rows are sorted by their weight on the device, and a tile has one weight, so nothing waits for the host and no
row's result depends on others.

Shape letters: M rows of inputs, R rows of outputs, K inputs, N outputs, X experts (or adapters).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.linear.formats import FP8_BLOCK, INT4_MIDDLE, Int4Weight, Int8Weight
from engine.kernels.linear.triton_linear import TILE_K, TILE_M, TILE_N, scaled_tile, step_of, weight_tile


@dataclass(frozen=True, kw_only=True)
class GroupedRows:
    """Rows sorted by the weight that they meet, cut into tiles of TILE_M that have one weight each."""

    order: Tensor  # [tiles * TILE_M] int32, row in the input; -1 fills up
    weight_of_tile: Tensor  # [tiles] int32; -1 is no weight (and no product)
    num_rows: int

    @classmethod
    def of(cls, choice: Tensor, num_weights: int) -> GroupedRows:
        """choice [R] int32: which weight row r meets; -1 is none. No synchronization with the host: the
        number of tiles is the most that there can be.
        """
        device, num_rows = choice.device, choice.shape[0]
        tiles = num_rows // TILE_M + min(num_weights + 1, num_rows)
        counts = torch.zeros(num_weights + 1, dtype=torch.int64, device=device)
        counts.scatter_add_(0, (choice + 1).long(), torch.ones_like(choice, dtype=torch.int64))
        padded = (counts + TILE_M - 1) // TILE_M * TILE_M
        ends = padded.cumsum(0)
        by_weight = torch.argsort(choice, stable=True)
        within = torch.arange(num_rows, device=device) - (counts.cumsum(0) - counts)[choice[by_weight] + 1]
        place = (ends - padded)[choice[by_weight] + 1] + within
        order = torch.full((tiles * TILE_M,), -1, dtype=torch.int32, device=device)
        order.scatter_(0, place, by_weight.int())
        firsts = torch.arange(tiles, device=device) * TILE_M
        weight_of_tile = torch.searchsorted(ends, firsts, right=True).int() - 1
        weight_of_tile = torch.where(firsts < ends[-1], weight_of_tile, -1)
        return cls(order=order, weight_of_tile=weight_of_tile, num_rows=num_rows)


@triton.jit
def _rows_of_tile(order, TILE_M: tl.constexpr):
    """Rows [TILE_M] of this program's tile, and which of them there are."""
    row = tl.load(order + tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    present = row >= 0
    return tl.where(present, row, 0), present


@triton.jit
def grouped_kernel(
    x,
    weights,
    out,
    order,
    weight_of_tile,
    scale,
    inputs,
    outputs,
    rows_per_input,
    ADD: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Tile t of rows times weights[weight_of_tile[t]]. Row r of the order reads x[r // rows_per_input]."""
    chosen = tl.load(weight_of_tile + tl.program_id(0)).to(tl.int64)
    if chosen < 0:
        return
    row, present = _rows_of_tile(order, TILE_M)
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
    mask = present[:, None] & in_columns[None, :]
    if ADD:
        total = total * scale + tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def grouped_weight_only_kernel(
    x,
    weight,
    scale,
    minimum,
    out,
    order,
    weight_of_tile,
    inputs,
    outputs,
    groups,
    rows_per_input,
    BITS: tl.constexpr,
    MIDDLE: tl.constexpr,
    MINIMUM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """As grouped_kernel, with weights of 4 or 8 bits: all [X * N, ...], outputs of weight 0 first."""
    chosen = tl.load(weight_of_tile + tl.program_id(0)).to(tl.int64)
    if chosen < 0:
        return
    row, present = _rows_of_tile(order, TILE_M)
    column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    in_columns = column < outputs
    place = tl.arange(0, TILE_K)
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, inputs, TILE_K):
        at = x + (row // rows_per_input)[:, None] * inputs + (start + place)[None, :]
        some = tl.load(at, mask=present[:, None] & (start + place < inputs)[None, :], other=0.0)
        values = weight_tile(
            weight,
            scale,
            minimum,
            chosen * outputs + column,
            in_columns,
            start,
            inputs,
            groups,
            BITS,
            MIDDLE,
            MINIMUM,
            TILE_K,
        )
        total = tl.dot(some, tl.trans(values.to(some.dtype)), total, input_precision="ieee")
    at = out + row[:, None] * outputs + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=present[:, None] & in_columns[None, :])


@triton.jit
def grouped_scaled_kernel(
    x,
    x_scale,
    weight,
    weight_scale,
    out,
    order,
    weight_of_tile,
    inputs,
    outputs,
    rows_per_input,
    INTEGER: tl.constexpr,
    BLOCKED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
):
    """As grouped_kernel, products of 8-bit inputs with 8-bit weights; scales as scaled_kernel has them, those
    of weights [X * N], or [X * N/128, K/128] BLOCKED.
    """
    chosen = tl.load(weight_of_tile + tl.program_id(0)).to(tl.int64)
    if chosen < 0:
        return
    row, present = _rows_of_tile(order, TILE_M)
    column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    in_columns = column < outputs
    first_block = (
        chosen * ((outputs + SCALE_BLOCK - 1) // SCALE_BLOCK) + tl.program_id(1) * TILE_N // SCALE_BLOCK
    )
    result = scaled_tile(
        x,
        x_scale,
        weight,
        weight_scale,
        row // rows_per_input,
        present,
        chosen * outputs + column,
        in_columns,
        first_block,
        inputs,
        INTEGER,
        BLOCKED,
        TILE_M,
        TILE_N,
        TILE_K,
        SCALE_BLOCK,
    )
    at = out + row[:, None] * outputs + column[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=present[:, None] & in_columns[None, :])


def grouped_product(x: Tensor, weights: Tensor, groups: GroupedRows, *, rows_per_input: int = 1) -> Tensor:
    """x [M, K], weights [X, N, K] -> [R, N], row r being x[r // rows_per_input] times its weight:
    experts with rows_per_input = active experts per token on the way in, and 1 on the way out. Rows without a
    weight are zero.
    """
    out = torch.zeros(groups.num_rows, weights.shape[1], dtype=x.dtype, device=x.device)
    _grouped(x, weights, out, groups, rows_per_input, 1.0, add=False)
    return out


def add_adapters(
    out: Tensor, x: Tensor, down: Tensor, up: Tensor, groups: GroupedRows, *, scale: float = 1.0
) -> None:
    """LoRA for mixed adapters: out [M, N] += scale * x [M, K] down[a]^T up[a]^T, a being the adapter of each
    row.

    down [X, rank, K], up [X, N, rank]. Rows without an adapter stay as they are.
    """
    shrunk = torch.zeros(x.shape[0], down.shape[1], dtype=torch.float32, device=x.device)
    _grouped(x, down, shrunk, groups, 1, 1.0, add=False)
    _grouped(shrunk.to(x.dtype), up, out, groups, 1, scale, add=True)


def _grouped(
    x: Tensor,
    weights: Tensor,
    out: Tensor,
    groups: GroupedRows,
    rows_per_input: int,
    scale: float,
    *,
    add: bool,
) -> None:
    outputs, inputs = weights.shape[1:]
    tiles = groups.weight_of_tile.shape[0]
    if not tiles:
        return
    grouped_kernel[(tiles, triton.cdiv(outputs, TILE_N))](
        x,
        weights,
        out,
        groups.order,
        groups.weight_of_tile,
        scale,
        inputs,
        outputs,
        rows_per_input,
        ADD=add,
        TILE_M=TILE_M,
        TILE_N=TILE_N,
        TILE_K=TILE_K,
    )


def grouped_weight_only_product(
    x: Tensor,
    weight: Int4Weight | Int8Weight,
    num_weights: int,
    groups: GroupedRows,
    *,
    rows_per_input: int = 1,
) -> Tensor:
    """grouped_product with weights of 4 or 8 bits, one after another in `weight` [X * N, K], which has
    neither order nor smoothing.
    """
    outputs, inputs = weight.shape[0] // num_weights, weight.shape[1]
    out = torch.zeros(groups.num_rows, outputs, dtype=x.dtype, device=x.device)
    tiles = groups.weight_of_tile.shape[0]
    int4 = weight if isinstance(weight, Int4Weight) else None
    minimum = None if int4 is None else int4.minimum
    if tiles:
        grouped_weight_only_kernel[(tiles, triton.cdiv(outputs, TILE_N))](
            x,
            weight.packed if isinstance(weight, Int4Weight) else weight.values,
            weight.scale,
            minimum if minimum is not None else weight.scale,
            out,
            groups.order,
            groups.weight_of_tile,
            inputs,
            outputs,
            weight.scale.shape[1],
            rows_per_input,
            BITS=8 if int4 is None else 4,
            MIDDLE=0 if int4 is None else INT4_MIDDLE,
            MINIMUM=minimum is not None,
            TILE_M=TILE_M,
            TILE_N=TILE_N,
            TILE_K=step_of(weight),
        )
    return out


def grouped_scaled_product(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    groups: GroupedRows,
    *,
    dtype: torch.dtype,
    rows_per_input: int = 1,
) -> Tensor:
    """grouped_product of x [M, K] with weight [X, N, K], both int8 or both float8_e4m3, in `dtype`. Scales
    are float32: [M] and [X, N], or for float8 in blocks [M, K/128] and [X, N/128, K/128], rounded up.
    """
    outputs, inputs = weight.shape[1:]
    out = torch.zeros(groups.num_rows, outputs, dtype=dtype, device=x.device)
    tiles = groups.weight_of_tile.shape[0]
    if tiles:
        grouped_scaled_kernel[(tiles, triton.cdiv(outputs, TILE_N))](
            x,
            x_scale,
            weight,
            weight_scale,
            out,
            groups.order,
            groups.weight_of_tile,
            inputs,
            outputs,
            rows_per_input,
            INTEGER=x.dtype == torch.int8,
            BLOCKED=x_scale.dim() == 2,
            TILE_M=TILE_M,
            TILE_N=TILE_N,
            TILE_K=TILE_K,
            SCALE_BLOCK=FP8_BLOCK,
        )
    return out
