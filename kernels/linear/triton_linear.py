"""Matrix products with weights of 4 and 8 bits and inputs in floating point, in Triton: one weight for all
rows, or one of several for each.

Levels are multiplied as the whole numbers that they are, which no type rounds, and a group's sum by its
scale.

Shape letters: M rows, K inputs, N outputs, G groups of inputs, X weights, R rows that chose one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation.triton_activation import KINDS
from kernels.config import triton_interprets
from kernels.linear.formats import INT4_MIDDLE
from kernels.linear.triton_packing import PackedLevels
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

MIDDLE = tl.constexpr(INT4_MIDDLE)
# Outputs of which one program makes numbers.
DENSE_TILE = 64


@triton.constexpr_function
def code_of(place: int, half: bool) -> str:
    """Four bits of both 16-bit lanes of a register, from bit 4 * place on, below the bits of a number whose
    lowest bit counts ones (1024 in float16, 128 in bfloat16): two operations for two numbers.
    """
    ones = "0x64006400" if half else "0x43004300"
    return f"{{ .reg .b32 t; shr.b32 t, $1, {4 * place}; lop3.b32 $0, t, 0x000F000F, {ones}, 0xEA; }}"


@triton.jit
def nibbles(words, PLACE: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """128 (in float16 1024) plus the four bits of words [N, W] from bit 4 * PLACE on."""
    HALF: tl.constexpr = tl.float16 == DTYPE
    if INTERPRETED:
        bits = ((words >> (4 * PLACE)) & 15) | (0x6400 if HALF else 0x4300)
        found = bits.to(tl.int16).to(DTYPE, bitcast=True)
    elif HALF:
        found = tl.inline_asm_elementwise(code_of(PLACE, True), "=r,r", [words], tl.float16, True, 2)
    else:
        found = tl.inline_asm_elementwise(code_of(PLACE, False), "=r,r", [words], tl.bfloat16, True, 2)
    return found


@triton.jit
def numbers(
    words,
    zero,
    PLACE: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Level PLACE of words [N, W], less the zero [N] of its output where there is one, else less the middle;
    exact in every type.
    """
    ONES: tl.constexpr = 1024.0 if tl.float16 == DTYPE else 128.0
    if tl.float32 == DTYPE:
        levels = ((words.to(tl.int32) >> (BITS * PLACE)) & ((1 << BITS) - 1)).to(tl.float32)
        found = levels - (zero[:, None] if ZERO else 1 << (BITS - 1))
    elif BITS == 8:
        # Seven bits of bfloat16 hold no byte, but the sum of its halves is exact.
        high = (nibbles(words, 2 * PLACE + 1, DTYPE, INTERPRETED) - (ONES + 8)) * 16
        found = high + (nibbles(words, 2 * PLACE, DTYPE, INTERPRETED) - ONES)
    elif ZERO:
        found = nibbles(words, PLACE, DTYPE, INTERPRETED) - (zero + ONES).to(DTYPE)[:, None]
    else:
        found = nibbles(words, PLACE, DTYPE, INTERPRETED) - (MIDDLE + ONES)
    return found


@triton.jit
def of_step(table, step, group, stored, output, STEP: tl.constexpr, EACH: tl.constexpr):
    """Rows of a table [G, stored] that the quarters of a step meet, at `output`: one for all of them, or one
    for each half or quarter (EACH of 2 or 4).
    """
    first = tl.load(table + (step * STEP // group) * stored + output).to(tl.float32)
    second, third, fourth = first, first, first
    if EACH == 4:
        second = tl.load(table + ((step * STEP + STEP // 4) // group) * stored + output).to(tl.float32)
    if EACH >= 2:
        third = tl.load(table + ((step * STEP + STEP // 2) // group) * stored + output).to(tl.float32)
        fourth = third
    if EACH == 4:
        fourth = tl.load(table + ((step * STEP + STEP // 4 * 3) // group) * stored + output).to(tl.float32)
    return first, second, third, fourth


@triton.jit
def levels_product(
    x,
    words,
    scale,
    offset,
    source,
    in_rows,
    output,
    begin,
    end,
    inputs,
    stored,
    group,
    x_stride,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    STEP: tl.constexpr,
    EACH: tl.constexpr,
    EVEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """The sum over steps [begin, end): [TILE_N, TILE_M] float32."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    COUNT: tl.constexpr = 16 // BITS
    WIDTH: tl.constexpr = STEP // COUNT
    place = tl.arange(0, WIDTH)
    total = tl.zeros([TILE_N, TILE_M], tl.float32)
    ones = tl.full([TILE_N, WIDTH], 1.0, DTYPE)
    factors = of_step(scale, begin, group, stored, output, STEP, EACH)
    for step in range(begin, end):
        # Loaded a step ahead: no product waits for it.
        following = of_step(scale, tl.minimum(step + 1, end - 1), group, stored, output, STEP, EACH)
        offsets = factors
        if OFFSET != "none":
            offsets = of_step(offset, step, group, stored, output, STEP, EACH)
        loaded = tl.load(words + (step * stored + output)[:, None] * WIDTH + place[None, :])
        part = tl.zeros([TILE_N, TILE_M], tl.float32)
        sums = tl.zeros([TILE_N, TILE_M], tl.float32)
        for index in tl.static_range(COUNT):
            column = step * STEP + index * WIDTH + place
            inside = in_rows[:, None] if EVEN else in_rows[:, None] & (column < inputs)[None, :]
            some = tl.load(x + source[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
            other = numbers(
                loaded, offsets[index * 4 // COUNT], index, BITS, OFFSET == "zero", DTYPE, INTERPRETED
            )
            part = tl.dot(other, tl.trans(some), part, input_precision="ieee")
            if OFFSET == "minimum":
                # By a product, as its order of additions does not depend on the number of rows.
                sums = tl.dot(ones, tl.trans(some), sums, input_precision="ieee")
            if (index + 1) * EACH % COUNT == 0:
                total += part * factors[index * 4 // COUNT][:, None]
                part = tl.zeros([TILE_N, TILE_M], tl.float32)
                if OFFSET == "minimum":
                    total += sums * offsets[index * 4 // COUNT][:, None]
                    sums = tl.zeros([TILE_N, TILE_M], tl.float32)
        factors = following
    return total


# The number of rows changes from step to step; it must not decide what is compiled.
@triton.jit(do_not_specialize=["rows"])
def weight_only_kernel(
    x,
    words,
    scale,
    offset,
    bias,
    out,
    sums,
    arrived,
    order,
    weight_of_tile,
    rows,
    inputs,
    outputs,
    stored,
    group,
    x_stride,
    rows_per_input,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    GROUPED: tl.constexpr,
    PARTS: tl.constexpr,
    PARTED: tl.constexpr,
    STEP: tl.constexpr,
    EACH: tl.constexpr,
    EVEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """x [M, K] times a weight of 4 or 8 bits (PackedLevels). PARTED: program_id(2) is one of PARTS of K, else
    a program computes them all, one after the other. GROUPED: tile t of rows meets weight weight_of_tile[t]
    of all [X * N, ...], and row r of the order reads x[r // rows_per_input].
    """
    chosen = 0
    if GROUPED:
        chosen = tl.load(weight_of_tile + tl.program_id(0)).to(tl.int64)
        if chosen < 0:
            return
    row, in_rows = rows_of_tile(order, rows, GROUPED, TILE_M)
    output = chosen * outputs + outputs_of_tile(outputs, GATE >= 0, TILE_N)
    source = row // rows_per_input if GROUPED else row
    steps = tl.cdiv(inputs, STEP)
    each = tl.cdiv(steps, PARTS)
    # fmt: off
    if PARTED or PARTS == 1:
        first = tl.program_id(2) * each
        total = levels_product(
            x, words, scale, offset, source, in_rows, output, first, tl.minimum(first + each, steps), inputs,
            stored, group, x_stride, BITS, OFFSET, STEP, EACH, EVEN, INTERPRETED, TILE_M, TILE_N,
        )
    else:
        total = tl.zeros([TILE_N, TILE_M], tl.float32)
        for first in range(0, steps, each):
            total += levels_product(
                x, words, scale, offset, source, in_rows, output, first, tl.minimum(first + each, steps),
                inputs, stored, group, x_stride, BITS, OFFSET, STEP, EACH, EVEN, INTERPRETED, TILE_M, TILE_N,
            )
    # fmt: on
    if PARTED:
        if not leave_part(total, sums, arrived, in_rows, PARTS, TILE_M, TILE_N):
            return
        total = sum_of_parts(sums, arrived, in_rows, PARTS, TILE_M, TILE_N)
    store_tile(total, bias, out, row, in_rows, output, outputs, BIAS, GATE, TILE_M, TILE_N)


@triton.jit
def dense_levels_kernel(
    words,
    scale,
    offset,
    out,
    inputs,
    outputs,
    group,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    STEP: tl.constexpr,
    EACH: tl.constexpr,
    INTERPRETED: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Step program_id(0) of outputs [program_id(1) * TILE_N, ...) of a weight, as numbers of out [N, K]."""
    COUNT: tl.constexpr = 16 // BITS
    WIDTH: tl.constexpr = STEP // COUNT
    step = tl.program_id(0)
    output = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    there = output < outputs
    known = tl.minimum(output, outputs - 1)
    place = tl.arange(0, WIDTH)
    factors = of_step(scale, step, group, outputs, known, STEP, EACH)
    offsets = factors
    if OFFSET != "none":
        offsets = of_step(offset, step, group, outputs, known, STEP, EACH)
    loaded = tl.load(words + (step * outputs + known).to(tl.int64)[:, None] * WIDTH + place[None, :])
    for index in tl.static_range(COUNT):
        column = step * STEP + index * WIDTH + place
        offset_here = offsets[index * 4 // COUNT]
        levels = numbers(
            loaded, offset_here, index, BITS, OFFSET == "zero", out.dtype.element_ty, INTERPRETED
        ).to(tl.float32)
        found = levels * factors[index * 4 // COUNT][:, None]
        if OFFSET == "minimum":
            found += offset_here[:, None]
        at = out + output.to(tl.int64)[:, None] * inputs + column[None, :]
        tl.store(at, found.to(out.dtype.element_ty), mask=there[:, None] & (column < inputs)[None, :])


def dense_levels(weight: PackedLevels, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] as numbers of a type; inputs are in the order in which they are stored."""
    outputs, inputs = weight.shape
    out = torch.empty(outputs, inputs, dtype=dtype, device=weight.words.device)
    kind, offset = weight.offset
    dense_levels_kernel[(weight.words.shape[0], triton.cdiv(outputs, DENSE_TILE))](
        weight.words,
        weight.scale,
        offset,
        out,
        inputs,
        outputs,
        weight.group,
        BITS=weight.bits,
        OFFSET=kind,
        STEP=weight.step,
        EACH=weight.scales_per_step,
        INTERPRETED=triton_interprets(),
        TILE_N=DENSE_TILE,
    )
    return out


def arranged(x: Tensor, weight: PackedLevels) -> Tensor:
    """Inputs [M, K] smoothed, and in the order in which the weight is stored."""
    if weight.smoothing is not None:
        x = (x.float() * weight.smoothing).to(x.dtype)
    return x if weight.order is None else x.index_select(1, weight.order)


def weight_only_product(
    x: Tensor,
    weight: PackedLevels,
    bias: Tensor | None = None,
    *,
    groups: GroupedRows | None = None,
    num_weights: int = 1,
    rows_per_input: int = 1,
    gate: str | None = None,
) -> Tensor:
    """x [M, K] in floating point -> [M, N] in x's type, or with a gate [M, N / 2].

    With groups of R rows -> R of them, row r being x[r // rows_per_input] times the one that it chose of
    num_weights, which lie one after another in `weight` and have neither order nor smoothing; bias is
    [X * N] then.
    """
    x = arranged(x, weight)
    assert x.stride(1) == 1, "inputs of a row lie side by side"
    stored, inputs = weight.shape
    outputs, num_rows = stored // num_weights, x.shape[0] if groups is None else groups.num_rows
    out = torch.empty(num_rows, outputs // (1 + (gate is not None)), dtype=x.dtype, device=x.device)
    steps = weight.words.shape[0]
    parts = num_parts(outputs, steps, x.device) if groups is None else 1
    parted = parts > 1 and num_rows <= MOST_PARTED_ROWS
    workspace = Workspace.of(x.device) if parted else None
    kind, offset = weight.offset

    def start(shape: TileShape) -> None:
        weight_only_kernel[grid_of(shape, num_rows, out.shape[1], groups, parts if parted else 1, gate)](
            x,
            weight.words,
            weight.scale,
            offset,
            bias if bias is not None else weight.scale,
            out,
            workspace.sums if workspace is not None else weight.scale,
            workspace.arrived if workspace is not None else weight.scale,
            groups.order if groups is not None else weight.scale,
            groups.weight_of_tile if groups is not None else weight.scale,
            num_rows,
            inputs,
            outputs,
            stored,
            weight.group,
            x.stride(0),
            rows_per_input,
            BITS=weight.bits,
            OFFSET=kind,
            BIAS=bias is not None,
            GATE=KINDS[gate] if gate is not None else -1,
            GROUPED=groups is not None,
            PARTS=parts,
            PARTED=parted,
            STEP=weight.step,
            EACH=weight.scales_per_step,
            EVEN=inputs % weight.step == 0,
            INTERPRETED=triton_interprets(),
            TILE_M=shape.rows,
            TILE_N=shape.outputs,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )

    if num_rows:
        sums = 2 + (weight.minimum is not None)
        launch("levels", shape_for(num_rows, groups, wide=x.element_size() > 2, sums=sums), start)
    return out
