"""Matrix products with quantized weights, in Triton: one weight for all rows, or one of several for each.

The order of additions along K does not depend on the number of rows, and every launch of a weight has the
same tile, so a row's result does not depend on the batch.

Shape letters: M rows, K inputs, N outputs, G groups of inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.linear.formats import FP8_BLOCK, INT4_MIDDLE, Int4Weight, Int8Weight
from engine.kernels.linear.triton_rows import TILE_M, GroupedRows, rows_of_tile
from engine.kernels.norm.triton_norm import LIMITS, scaled_row
from engine.kernels.rows import Quantized, empty_scales

TILE_N, TILE_K = 64, 64


@triton.jit
def weight_tile(
    weight,
    scale,
    minimum,
    column,
    in_columns,
    start,
    inputs,
    groups,
    BITS: tl.constexpr,
    MIDDLE: tl.constexpr,
    MINIMUM: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """What stands in rows `column` (int64) of a weight of 4 or 8 bits, inputs [start, start + TILE_K), which
    lie in one group: [columns, TILE_K] float32, anything finite outside.
    """
    if BITS == 4:
        half = tl.arange(0, TILE_K // 2)
        at = weight + column[:, None] * (inputs // 2) + (start // 2 + half)[None, :]
        inside = in_columns[:, None] & (start + 2 * half < inputs)[None, :]
        packed = tl.load(at, mask=inside, other=0)
        levels = tl.interleave(packed & 15, packed >> 4).to(tl.float32)
    else:
        place = start + tl.arange(0, TILE_K)
        at = weight + column[:, None] * inputs + place[None, :]
        levels = tl.load(at, mask=in_columns[:, None] & (place < inputs)[None, :], other=0).to(tl.float32)
    at_group = column * groups + start // (inputs // groups)
    factor = tl.load(scale + at_group, mask=in_columns, other=0.0)
    if MINIMUM:
        lowest = tl.load(minimum + at_group, mask=in_columns, other=0.0)
        values = levels * factor[:, None] + lowest[:, None]
    else:
        values = (levels - MIDDLE) * factor[:, None]
    return values


# The number of rows changes from step to step; it must not decide what is compiled.
@triton.jit(do_not_specialize=["rows"])
def weight_only_kernel(
    x,
    weight,
    scale,
    minimum,
    bias,
    out,
    order,
    weight_of_tile,
    rows,
    inputs,
    outputs,
    groups,
    x_stride,
    rows_per_input,
    BITS: tl.constexpr,
    MIDDLE: tl.constexpr,
    MINIMUM: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPED: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_M: tl.constexpr = TILE_M,
    TILE_N: tl.constexpr = TILE_N,
):
    """x [M, K] times a weight of 4 or 8 bits with one scale per output and group; TILE_K divides a group.
    GROUPED: tile t of rows meets weight weight_of_tile[t] of all [X * N, ...], and row r of the order reads
    x[r // rows_per_input].
    """
    row, in_rows = rows_of_tile(order, rows, GROUPED, TILE_M)
    column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    in_columns = column < outputs
    column = column.to(tl.int64)
    source, output = row, column
    if GROUPED:
        chosen = tl.load(weight_of_tile + tl.program_id(0)).to(tl.int64)
        if chosen < 0:
            return
        source, output = row // rows_per_input, chosen * outputs + column
    place = tl.arange(0, TILE_K)
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, inputs, TILE_K):
        mask = in_rows[:, None] & (start + place < inputs)[None, :]
        some = tl.load(x + source[:, None] * x_stride + (start + place)[None, :], mask=mask, other=0.0)
        values = weight_tile(
            weight, scale, minimum, output, in_columns, start, inputs, groups, BITS, MIDDLE, MINIMUM, TILE_K
        )
        total = tl.dot(some, tl.trans(values.to(some.dtype)), total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    at = out + row[:, None] * outputs + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


def weight_only_product(
    x: Tensor,
    weight: Int4Weight | Int8Weight,
    bias: Tensor | None = None,
    *,
    groups: GroupedRows | None = None,
    num_weights: int = 1,
    rows_per_input: int = 1,
) -> Tensor:
    """x [M, K] in floating point -> [M, N] in x's type. Weights of AWQ, GPTQ and compressed-tensors
    checkpoints come in this form (engine/quantization reads them).

    With groups of R rows -> [R, N], row r being x[r // rows_per_input] times the one that it chose of
    num_weights, which lie one after another in `weight` and have neither order nor smoothing.
    """
    if isinstance(weight, Int8Weight) and weight.smoothing is not None:
        x = (x.float() * weight.smoothing).to(x.dtype)
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    assert x.stride(1) == 1, "inputs of a row lie side by side"
    outputs, inputs = weight.shape[0] // num_weights, weight.shape[1]
    rows, tiles = _rows_and_tiles(x, groups)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    is_int4 = isinstance(weight, Int4Weight)
    minimum = weight.minimum if isinstance(weight, Int4Weight) else None
    if tiles:
        weight_only_kernel[(tiles, triton.cdiv(outputs, TILE_N))](
            x,
            weight.packed if isinstance(weight, Int4Weight) else weight.values,
            weight.scale,
            minimum if minimum is not None else weight.scale,
            bias if bias is not None else weight.scale,
            out,
            groups.order if groups is not None else weight.scale,
            groups.weight_of_tile if groups is not None else weight.scale,
            rows,
            inputs,
            outputs,
            weight.scale.shape[1],
            x.stride(0),
            rows_per_input,
            BITS=4 if is_int4 else 8,
            MIDDLE=INT4_MIDDLE if is_int4 else 0,
            MINIMUM=minimum is not None,
            BIAS=bias is not None,
            GROUPED=groups is not None,
            TILE_K=step_of(weight),
        )
    return out


def _rows_and_tiles(x: Tensor, groups: GroupedRows | None) -> tuple[int, int]:
    """Rows of the result, and how many tiles of them there are."""
    if groups is None:
        return x.shape[0], triton.cdiv(x.shape[0], TILE_M)
    return groups.num_rows, groups.weight_of_tile.shape[0]


def step_of(weight: Int4Weight | Int8Weight) -> int:
    """Inputs of one step: they have one scale."""
    return min(TILE_K, weight.group_size & -weight.group_size) if weight.scale.shape[1] > 1 else TILE_K


@triton.jit
def quantize_rows_kernel(
    x,
    factors,
    out,
    scales,
    row_stride,
    inner,
    width,
    BLOCK: tl.constexpr,
    FACTORS: tl.constexpr,
    LIMIT: tl.constexpr,
    ROUND: tl.constexpr,
):
    """One program per part of a row; `inner` parts of `width` inputs make a row."""
    part = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < width
    at = x + part // inner * row_stride + part % inner * width + place
    values = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if FACTORS:
        values *= tl.load(factors + part % inner * width + place, mask=inside, other=0.0)
    levels, scale = scaled_row(values, LIMIT, ROUND)
    tl.store(out + part * width + place, levels.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + part, scale)


def quantize_rows(
    x: Tensor, kind: Quantized, *, factors: Tensor | None = None, block: int = 0
) -> tuple[Tensor, Tensor]:
    """x [M, K], times factors [K] where given -> int8 or fp8 [M, K] and scales [M], or [M, K/block]."""
    rows, inputs = x.shape
    assert x.stride(1) == 1, "inputs of a row lie side by side"
    width = block or inputs
    inner = inputs // width
    out = torch.empty(
        rows, inputs, dtype={"int8": torch.int8, "fp8": torch.float8_e4m3fn}[kind], device=x.device
    )
    scales = empty_scales(rows, x.device)
    if block:
        scales = torch.empty(rows, inner, dtype=torch.float32, device=x.device)
    size = triton.next_power_of_2(width)
    if rows:
        quantize_rows_kernel[(rows * inner,)](
            x,
            factors if factors is not None else scales,
            out,
            scales,
            x.stride(0),
            inner,
            width,
            BLOCK=size,
            FACTORS=factors is not None,
            LIMIT=LIMITS[kind],
            ROUND=kind == "int8",
            num_warps=max(1, min(16, size // 512)),
        )
    return out, scales


# The number of rows changes from step to step; it must not decide what is compiled.
@triton.jit(do_not_specialize=["rows"])
def scaled_kernel(
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    out,
    order,
    weight_of_tile,
    rows,
    inputs,
    outputs,
    rows_per_input,
    INTEGER: tl.constexpr,
    BLOCKED: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPED: tl.constexpr,
    TILE_M: tl.constexpr = TILE_M,
    TILE_N: tl.constexpr = TILE_N,
    TILE_K: tl.constexpr = TILE_K,
    SCALE_BLOCK: tl.constexpr = FP8_BLOCK,
):
    """Products of 8-bit inputs with 8-bit weights: int8, or float8. BLOCKED: one scale per row and
    SCALE_BLOCK inputs (for weights also SCALE_BLOCK outputs, of which TILE_N is a divisor), else one per row
    and per output. GROUPED as in weight_only_kernel; scales of weights are [X * N], or [X * N/128, K/128].
    """
    row, in_rows = rows_of_tile(order, rows, GROUPED, TILE_M)
    column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    in_columns = column < outputs
    column = column.to(tl.int64)
    source, output = row, column
    # The row of the weight's scales that all outputs of the tile share.
    first_block = tl.program_id(1) * TILE_N // SCALE_BLOCK
    if GROUPED:
        chosen = tl.load(weight_of_tile + tl.program_id(0)).to(tl.int64)
        if chosen < 0:
            return
        source, output = row // rows_per_input, chosen * outputs + column
        first_block += chosen * ((outputs + SCALE_BLOCK - 1) // SCALE_BLOCK)
    place = tl.arange(0, TILE_K)
    blocks = (inputs + SCALE_BLOCK - 1) // SCALE_BLOCK
    ZERO: tl.constexpr = 0 if INTEGER else 0.0
    if INTEGER:
        total = tl.zeros([TILE_M, TILE_N], tl.int32)
    else:
        total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, inputs, TILE_K):
        there = start + place < inputs
        at = x + source[:, None] * inputs + (start + place)[None, :]
        some = tl.load(at, mask=in_rows[:, None] & there[None, :], other=ZERO)
        at = weight + output[:, None] * inputs + (start + place)[None, :]
        other = tl.trans(tl.load(at, mask=in_columns[:, None] & there[None, :], other=ZERO))
        if INTEGER:
            total = tl.dot(some, other, total, out_dtype=tl.int32)
        elif BLOCKED:
            block = start // SCALE_BLOCK
            left = tl.load(x_scale + source * blocks + block, mask=in_rows, other=0.0)
            right = tl.load(weight_scale + first_block * blocks + block)
            total += tl.dot(some, other) * (left * right)[:, None]
        else:
            total = tl.dot(some, other, total)
    result = total.to(tl.float32)
    if not BLOCKED:
        left = tl.load(x_scale + source, mask=in_rows, other=0.0)
        right = tl.load(weight_scale + output, mask=in_columns, other=0.0)
        result *= left[:, None] * right[None, :]
    if BIAS:
        result += tl.load(bias + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    at = out + row[:, None] * outputs + column[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


def scaled_product(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    groups: GroupedRows | None = None,
    rows_per_input: int = 1,
) -> Tensor:
    """x [M, K] and weight [N, K], both int8 or both float8_e4m3 -> [M, N] in `dtype`.

    Scales are float32: [M] and [N] (a scale per tensor is one repeated), or for float8 in blocks
    [M, K/128] and [N/128, K/128], rounded up. With groups of R rows and weights [X, N, K], whose scales have
    X in front, too -> [R, N], row r being x[r // rows_per_input] times its weight.
    """
    outputs, inputs = weight.shape[-2:]
    rows, tiles = _rows_and_tiles(x, groups)
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    if tiles:
        scaled_kernel[(tiles, triton.cdiv(outputs, TILE_N))](
            x,
            x_scale,
            weight,
            weight_scale,
            bias if bias is not None else weight_scale,
            out,
            groups.order if groups is not None else weight_scale,
            groups.weight_of_tile if groups is not None else weight_scale,
            rows,
            inputs,
            outputs,
            rows_per_input,
            INTEGER=x.dtype == torch.int8,
            BLOCKED=x_scale.dim() == 2,
            BIAS=bias is not None,
            GROUPED=groups is not None,
        )
    return out
