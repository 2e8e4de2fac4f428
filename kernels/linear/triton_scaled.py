"""Products of 8-bit inputs with 8-bit weights, int8 or float8, in Triton, and the rounding of inputs: one
weight for all rows, or one of several for each.

Shape letters: M rows, K inputs, N outputs, X weights, R rows that chose one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation.triton_activation import KINDS
from kernels.linear.formats import FP8_BLOCK
from kernels.linear.triton_rows import GroupedRows
from kernels.linear.triton_shapes import (
    MOST_PARTED_ROWS,
    TileShape,
    Workspace,
    grid_of,
    launch,
    num_parts,
    shape_for,
)
from kernels.linear.triton_tiles import (
    leave_part,
    outputs_of_tile,
    rows_of_tile,
    store_tile,
    sum_of_parts,
)
from kernels.norm.triton_norm import LIMITS, scaled_row
from kernels.rows import Quantized, empty_scales

# Inputs of a step; those of a block share a scale.
TILE_K = FP8_BLOCK


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
    offset = tl.arange(0, BLOCK)
    inside = offset < width
    at = x + part // inner * row_stride + part % inner * width + offset
    values = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if FACTORS:
        values *= tl.load(factors + part % inner * width + offset, mask=inside, other=0.0)
    levels, scale = scaled_row(values, LIMIT, ROUND)
    tl.store(out + part * width + offset, levels.to(out.dtype.element_ty), mask=inside)
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


@triton.jit
def scaled_part(
    x,
    x_scale,
    weight,
    weight_scale,
    source,
    in_rows,
    output,
    block_of_output,
    begin,
    end,
    inputs,
    INTEGER: tl.constexpr,
    BLOCKED: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """The sum over steps [begin, end): [TILE_N, TILE_M] int32 or float32, times scales where BLOCKED."""
    offset = tl.arange(0, TILE_K)
    blocks = tl.cdiv(inputs, TILE_K)
    KIND: tl.constexpr = tl.int32 if INTEGER else tl.float32
    ZERO: tl.constexpr = 0 if INTEGER else 0.0
    total = tl.zeros([TILE_N, TILE_M], KIND)
    if BLOCKED:
        left = tl.load(x_scale + source * blocks + begin, mask=in_rows, other=0.0)
        right = tl.load(weight_scale + block_of_output * blocks + begin)
    for step in range(begin, end):
        column = step * TILE_K + offset
        at_x = x + source[:, None] * inputs + column[None, :]
        at_weight = weight + output[:, None] * inputs + column[None, :]
        if EVEN:
            some = tl.load(at_x, mask=in_rows[:, None], other=ZERO)
            other = tl.load(at_weight)
        else:
            some = tl.load(at_x, mask=in_rows[:, None] & (column < inputs)[None, :], other=ZERO)
            other = tl.load(at_weight, mask=(column < inputs)[None, :], other=ZERO)
        if BLOCKED:
            # Loaded a step ahead: no product waits for them.
            following = tl.minimum(step + 1, end - 1)
            next_left = tl.load(x_scale + source * blocks + following, mask=in_rows, other=0.0)
            next_right = tl.load(weight_scale + block_of_output * blocks + following)
            total += tl.dot(other, tl.trans(some)) * (right[:, None] * left[None, :])
            left, right = next_left, next_right
        else:
            total = tl.dot(other, tl.trans(some), total, out_dtype=KIND)
    return total


# The number of rows changes from step to step; it must not decide what is compiled.
@triton.jit(do_not_specialize=["rows"])
def scaled_kernel(
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    out,
    sums,
    arrived,
    order,
    weight_of_tile,
    rows,
    inputs,
    outputs,
    rows_per_input,
    INTEGER: tl.constexpr,
    BLOCKED: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    GROUPED: tl.constexpr,
    PARTS: tl.constexpr,
    PARTED: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr = TILE_K,
):
    """BLOCKED: one scale per row and TILE_K inputs (for weights also TILE_K outputs), else one per row and
    per output. PARTED and GROUPED as in weight_only_kernel; scales of weights are [X * N], or
    [X * N/128, K/128].
    """
    chosen = 0
    if GROUPED:
        chosen = tl.load(weight_of_tile + tl.program_id(0)).to(tl.int64)
        if chosen < 0:
            return
    row, in_rows = rows_of_tile(order, rows, GROUPED, TILE_M)
    column = outputs_of_tile(outputs, GATE >= 0, TILE_N)
    output = chosen * outputs + column
    block_of_output = chosen * tl.cdiv(outputs, TILE_K) + column // TILE_K
    source = row // rows_per_input if GROUPED else row
    steps = tl.cdiv(inputs, TILE_K)
    each = tl.cdiv(steps, PARTS)
    # fmt: off
    if PARTED or PARTS == 1:
        first = tl.program_id(2) * each
        total = scaled_part(
            x, x_scale, weight, weight_scale, source, in_rows, output, block_of_output, first,
            tl.minimum(first + each, steps), inputs, INTEGER, BLOCKED, EVEN, TILE_M, TILE_N, TILE_K,
        )
    else:
        total = tl.zeros([TILE_N, TILE_M], tl.int32 if INTEGER else tl.float32)
        for first in range(0, steps, each):
            total += scaled_part(
                x, x_scale, weight, weight_scale, source, in_rows, output, block_of_output, first,
                tl.minimum(first + each, steps), inputs, INTEGER, BLOCKED, EVEN, TILE_M, TILE_N, TILE_K,
            )
    # fmt: on
    if PARTED:
        if not leave_part(total, sums, arrived, in_rows, PARTS, TILE_M, TILE_N):
            return
        total = sum_of_parts(sums, arrived, in_rows, PARTS, TILE_M, TILE_N)
    result = total.to(tl.float32)
    if not BLOCKED:
        left = tl.load(x_scale + source, mask=in_rows, other=0.0)
        result *= tl.load(weight_scale + output)[:, None] * left[None, :]
    store_tile(result, bias, out, row, in_rows, output, outputs, BIAS, GATE, TILE_M, TILE_N)


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
    gate: str | None = None,
) -> Tensor:
    """x [M, K] and weight [N, K], both int8 or both float8_e4m3 -> [M, N] in `dtype`, or with a gate
    [M, N / 2].

    Scales are float32: [M] and [N] (a scale per tensor is one repeated), or for float8 in blocks
    [M, K/128] and [N/128, K/128], rounded up. With groups of R rows and weights [X, N, K], whose scales have
    X in front, and whose bias is [X * N] -> R rows, row r being x[r // rows_per_input] times its weight.
    """
    outputs, inputs = weight.shape[-2:]
    num_rows = x.shape[0] if groups is None else groups.num_rows
    width = outputs // (1 + (gate is not None))
    out = torch.empty(num_rows, width, dtype=dtype, device=x.device)
    integer = x.dtype == torch.int8
    parts = num_parts(outputs, triton.cdiv(inputs, TILE_K), x.device) if groups is None else 1
    parted = parts > 1 and num_rows <= MOST_PARTED_ROWS
    workspace = Workspace.of(x.device) if parted else None
    sums = weight_scale if workspace is None else workspace.sums

    def start(shape: TileShape) -> None:
        scaled_kernel[grid_of(shape, num_rows, width, groups, parts if parted else 1, gate)](
            x,
            x_scale,
            weight,
            weight_scale,
            bias if bias is not None else weight_scale,
            out,
            sums.view(torch.int32) if integer else sums,
            workspace.arrived if workspace is not None else weight_scale,
            groups.order if groups is not None else weight_scale,
            groups.weight_of_tile if groups is not None else weight_scale,
            num_rows,
            inputs,
            outputs,
            rows_per_input,
            INTEGER=integer,
            BLOCKED=x_scale.dim() == 2,
            BIAS=bias is not None,
            GATE=KINDS[gate] if gate is not None else -1,
            GROUPED=groups is not None,
            PARTS=parts,
            PARTED=parted,
            EVEN=inputs % TILE_K == 0,
            TILE_M=shape.rows,
            TILE_N=shape.outputs,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )

    if num_rows:
        launch("8 bits", shape_for(num_rows, groups, sums=x_scale.dim()), start)
    return out
