"""Vectors in four bits (see four_bits) for the kernels in Triton: rotation, packing, and their levels.

Shape letters: R rows, D elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.norm.triton_norm import scaled_row


@triton.jit
def _signs(SIZE: tl.constexpr):
    """[SIZE] of the Rudin-Shapiro sequence."""
    index = tl.arange(0, SIZE)
    both = index & (index >> 1)
    both = both ^ (both >> 8)
    both = both ^ (both >> 4)
    both = both ^ (both >> 2)
    return (1 - 2 * ((both ^ (both >> 1)) & 1)).to(tl.float32)


@triton.jit
def _turned(x, TURN: tl.constexpr, BACK: tl.constexpr):
    """x [BLOCK] in float32, zeros where nothing is, rotated in blocks of TURN, or rotated BACK."""
    SIZE: tl.constexpr = x.shape[0]
    if not BACK:
        x = x * _signs(SIZE)
    # A butterfly spans 2, 4, ..., TURN elements; half of the span is 1 << POWER.
    for POWER in tl.static_range(0, 10):
        if (2 << POWER) <= TURN:
            pairs = tl.reshape(x, (SIZE // (2 << POWER), 2, 1 << POWER))
            a, b = tl.split(tl.permute(pairs, (0, 2, 1)))
            x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (SIZE,))
    x = x * (1.0 / tl.sqrt(tl.full((), TURN, tl.float32)))
    if BACK:
        x = x * _signs(SIZE)
    return x


@triton.jit
def store_four_bits(values, target, scale_at, DIM: tl.constexpr, TURN: tl.constexpr):
    """Writes one vector [BLOCK] (zeros outside DIM) to DIM / 2 bytes at target, and its scale."""
    SIZE: tl.constexpr = values.shape[0]
    levels, scale = scaled_row(_turned(values, TURN, False), 15.0, False)
    tl.store(scale_at, scale)
    offset = tl.arange(0, SIZE // 2)
    packed = tl.reshape(packed_codes(tl.reshape(levels, (1, SIZE))), (SIZE // 2,))
    tl.store(target + offset, packed, mask=offset < DIM // 2)


@triton.jit
def packed_codes(levels):
    """Bytes [rows, SIZE / 2] of the codes nearest to levels [rows, SIZE]."""
    ROWS: tl.constexpr = levels.shape[0]
    SIZE: tl.constexpr = levels.shape[1]
    code = ((levels + 15.0) * 0.5 + 12582912.0) - 12582912.0
    groups = tl.reshape(tl.minimum(tl.maximum(code, 0.0), 15.0).to(tl.int32), (ROWS, SIZE // 8, 2, 4))
    low, high = tl.split(tl.permute(groups, (0, 1, 3, 2)))
    return tl.reshape(low | (high << 4), (ROWS, SIZE // 2)).to(tl.uint8)


@triton.jit
def levels_of(base, at, there, SIZE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Levels of the vectors whose bytes begin at base + at [rows], as [rows, BLOCK]; zeros beyond SIZE, and
    where MASKED also in rows that are not `there`.
    """
    offset = tl.arange(0, BLOCK)
    inside = (offset < SIZE)[None, :]
    if MASKED:
        inside = inside & there[:, None]
    entries = base + at[:, None] + (offset // 8 * 4 + offset % 4)[None, :]
    packed = tl.load(entries, mask=inside, other=0).to(tl.int32)
    code = (packed >> (offset // 4 % 2 * 4)[None, :]) & 15
    return tl.where(inside, code * 2 - 15, 0)


@triton.jit
def turn_rows_kernel(x, out, DIM: tl.constexpr, BLOCK: tl.constexpr, TURN: tl.constexpr, BACK: tl.constexpr):
    """Program r: row r of x [R, DIM], rotated, to out."""
    row = tl.program_id(0).to(tl.int64) * DIM
    offset = tl.arange(0, BLOCK)
    values = tl.load(x + row + offset, mask=offset < DIM, other=0.0).to(tl.float32)
    turned = _turned(values, TURN, BACK)
    tl.store(out + row + offset, turned.to(out.dtype.element_ty), mask=offset < DIM)


def turn_rows(x: Tensor, *, back: bool = False) -> Tensor:
    """x [..., D], rotated or rotated back: a launch of its own, as queries and results of a step are few."""
    x = x.contiguous()
    out, dim = torch.empty_like(x), x.shape[-1]
    if x.numel():
        turn_rows_kernel[(x.numel() // dim,)](
            x, out, DIM=dim, BLOCK=triton.next_power_of_2(dim), TURN=dim & -dim, BACK=back, num_warps=1
        )
    return out
