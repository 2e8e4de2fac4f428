"""Blocks of GGUF files, read into the formats of `kernels/linear` with exactly the numbers that they mean.

Layouts are those of llama.cpp's ggml-common.h and ggml-quants.c. `stored` asks here for the reader of a type:
in codes, where products take them, each type lies in memory about as it does in its file; without, types of 4
and 8 bits have the older forms, and every other becomes dense.

A row is so many blocks of so many bytes. Shape letters: N outputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernels.linear.formats import CodedWeight, Int4Weight, Int8Weight, WeightFormat, pack_levels

Reader = Callable[[Tensor], WeightFormat]

# What the codes of IQ4_NL and IQ4_XS stand for, and twice what those of fp4 (e2m1) do.
IQ4_BOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_TWICE_FP4 = (0, 1, 2, 3, 4, 6, 8, 12)
TWICE_FP4_BOOK = (*_TWICE_FP4, *(-value for value in _TWICE_FP4))


def block_readers(*, coded: bool) -> dict[str, Reader]:
    """Readers of rows of bytes [N, bytes] by the type's name: those that have an exact form."""
    return _PLAIN | _CODED if coded else _PLAIN


def levels_book(bits: int, zero: int) -> tuple[int, ...]:
    """What codes stand for that are levels, `zero` of which is nothing."""
    return tuple(range(-zero, (1 << bits) - zero))


def _q8_0(rows: Tensor) -> WeightFormat:
    """float16 scale, 32 int8."""
    blocks = rows.view(rows.shape[0], -1, 34)
    values = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
    return Int8Weight(values=values, scale=_half_at(blocks, 0))


def _q4_0(rows: Tensor) -> WeightFormat:
    """float16 scale, 16 bytes: input i in the low, input i + 16 in the high four bits."""
    blocks = rows.view(rows.shape[0], -1, 18)
    return Int4Weight(packed=pack_levels(_halves(blocks[..., 2:])), scale=_half_at(blocks, 0))


def _q4_1(rows: Tensor) -> WeightFormat:
    """float16 scale and minimum, 16 bytes as in Q4_0."""
    blocks = rows.view(rows.shape[0], -1, 20)
    levels = pack_levels(_halves(blocks[..., 4:]))
    return Int4Weight(packed=levels, scale=_half_at(blocks, 0), minimum=_half_at(blocks, 2))


def _q4_k(rows: Tensor) -> WeightFormat:
    """As `_q4_k_coded`, with scales and minima multiplied out."""
    weight = _q4_k_coded(rows)
    minima = weight.minima()
    assert minima is not None, "the type has minima"
    return Int4Weight(packed=pack_levels(weight.codes), scale=weight.scales(), minimum=-minima)


def _q5(rows: Tensor, *, has_minimum: bool) -> CodedWeight:
    """float16 scale (and minimum), 32 upper bits, 16 bytes as in Q4_0."""
    start = 4 if has_minimum else 2
    blocks = rows.view(rows.shape[0], -1, start + 20)
    upper = _bits(blocks[..., start : start + 4, None], range(8), 1)
    return CodedWeight(
        codes=_halves(blocks[..., start + 4 :]) | upper.flatten(1) << 4,
        bits=5,
        book=levels_book(5, 0 if has_minimum else 16),
        scale=_half_at(blocks, 0),
        minimum=-_half_at(blocks, 2) if has_minimum else None,
    )


def _q2_k(rows: Tensor) -> CodedWeight:
    """16 bytes of scales (low four bits) and minima (high), 64 of codes, float16 scale of each.

    32 bytes of codes hold four groups of 32, the first in their lowest bits.
    """
    outputs = rows.shape[0]
    blocks = rows.view(outputs, -1, 84)
    factors = blocks[..., :16].reshape(outputs, -1)
    return CodedWeight(
        codes=_planes(blocks[..., 16:80], (0, 2, 4, 6), 3),
        bits=2,
        book=levels_book(2, 0),
        scale=_half_at(blocks, 80),
        step=(factors & 15).view(torch.int8),
        minimum=_half_at(blocks, 82),
        low=(factors >> 4).view(torch.int8),
    )


def _q3_k(rows: Tensor) -> CodedWeight:
    """32 bytes of upper bits, 64 of lower ones as in Q2_K, 16 scales of 6 bits in 12 bytes, float16 scale.

    The first 8 bytes of scales hold low halves, of eight scales and of the next eight; the last 4 upper bits.
    """
    outputs = rows.shape[0]
    blocks = rows.view(outputs, -1, 110)
    lower = _planes(blocks[..., 32:96], (0, 2, 4, 6), 3)
    upper = _planes(blocks[..., :32], range(8), 1)
    few = blocks[..., 96:108]
    steps = _bits(few[..., None, :8], (0, 4), 15, -2).flatten(-2)
    steps = steps | _bits(few[..., None, 8:], (0, 2, 4, 6), 3, -2).flatten(-2) << 4
    return CodedWeight(
        codes=lower | upper << 2,
        bits=3,
        book=levels_book(3, 4),
        scale=_half_at(blocks, 108),
        step=(steps.to(torch.int8) - 32).reshape(outputs, -1),
    )


def _six_bit_factors(few: Tensor) -> tuple[Tensor, Tensor]:
    """8 scales and 8 minima of 6 bits in 12 bytes [N, blocks, 12] -> int8 [N, G] each."""
    low, middle, high = few[..., :4], few[..., 4:8], few[..., 8:]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), dim=-1)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 6) << 4)), dim=-1)
    return scales.flatten(1).view(torch.int8), minima.flatten(1).view(torch.int8)


def _q4_k_coded(rows: Tensor) -> CodedWeight:
    """float16 scale of scales and of minima, 8 scales and minima of 6 bits in 12 bytes, 128 bytes of levels.

    32 bytes of levels hold one group of 32 in their low, and the next one in their high four bits.
    """
    blocks = rows.view(rows.shape[0], -1, 144)
    steps, lows = _six_bit_factors(blocks[..., 4:16])
    return CodedWeight(
        codes=_planes(blocks[..., 16:], (0, 4), 15),
        bits=4,
        book=levels_book(4, 0),
        scale=_half_at(blocks, 0),
        step=steps,
        minimum=_half_at(blocks, 2),
        low=lows,
    )


def _q5_k(rows: Tensor) -> CodedWeight:
    """As Q4_K, with 32 bytes of upper bits before the lower ones: bit i of each is of group i."""
    blocks = rows.view(rows.shape[0], -1, 176)
    steps, lows = _six_bit_factors(blocks[..., 4:16])
    upper = _planes(blocks[..., 16:48], range(8), 1)
    return CodedWeight(
        codes=_planes(blocks[..., 48:], (0, 4), 15) | upper << 4,
        bits=5,
        book=levels_book(5, 0),
        scale=_half_at(blocks, 0),
        step=steps,
        minimum=_half_at(blocks, 2),
        low=lows,
    )


def _q6_k(rows: Tensor) -> CodedWeight:
    """128 bytes of lower bits, 64 of upper ones, 16 int8 scales, float16 scale.

    64 bytes of lower bits hold two groups of 64, 32 bytes of upper ones four of 32.
    """
    outputs = rows.shape[0]
    blocks = rows.view(outputs, -1, 210)
    lower = _planes(blocks[..., :128], (0, 4), 15, size=64)
    return CodedWeight(
        codes=lower | _planes(blocks[..., 128:192], (0, 2, 4, 6), 3) << 4,
        bits=6,
        book=levels_book(6, 32),
        scale=_half_at(blocks, 208),
        step=blocks[..., 192:208].reshape(outputs, -1).view(torch.int8),
    )


def _iq4_nl(rows: Tensor) -> CodedWeight:
    """As Q4_0, in codes of `IQ4_BOOK`."""
    blocks = rows.view(rows.shape[0], -1, 18)
    return CodedWeight(codes=_halves(blocks[..., 2:]), bits=4, book=IQ4_BOOK, scale=_half_at(blocks, 0))


def _iq4_xs(rows: Tensor) -> CodedWeight:
    """float16 scale, the upper 2 bits of 8 scales in 2 bytes, their lower 4 in 4, 128 bytes as in IQ4_NL."""
    outputs = rows.shape[0]
    blocks = rows.view(outputs, -1, 136)
    upper = _bits(blocks[..., 2:4, None], (0, 2, 4, 6), 3).flatten(-2)
    lower = _bits(blocks[..., 4:8, None], (0, 4), 15).flatten(-2)
    return CodedWeight(
        codes=_planes(blocks[..., 8:], (0, 4), 15, size=16),
        bits=4,
        book=IQ4_BOOK,
        scale=_half_at(blocks, 0),
        step=((lower | upper << 4).to(torch.int8) - 32).reshape(outputs, -1),
    )


def _mxfp4(rows: Tensor, *, coded: bool) -> WeightFormat:
    """An exponent with bias 127, 16 bytes of fp4 as in Q4_0."""
    blocks = rows.view(rows.shape[0], -1, 17)
    return mxfp4_of(_halves(blocks[..., 1:]), blocks[..., 0], coded=coded)


def mxfp4_of(codes: Tensor, exponents: Tensor, *, coded: bool) -> CodedWeight | Int8Weight:
    """fp4 codes [N, K] and exponents uint8 [N, G], of which 255 is no number: then scales are infinite."""
    is_number = exponents != 255
    # The smallest exponent has no float32 that is a normal number.
    if coded and bool((is_number & (exponents != 0)).all()):
        half = torch.full((codes.shape[0], 1), 0.5, device=codes.device)
        return CodedWeight(codes=codes, bits=4, book=TWICE_FP4_BOOK, scale=half, step=exponents.contiguous())
    table = torch.tensor(TWICE_FP4_BOOK, dtype=torch.int8).to(codes.device)
    scale = torch.where(is_number, torch.exp2(exponents.float() - 128), torch.inf)
    return Int8Weight(values=table[codes.long()], scale=scale)


def _halves(data: Tensor) -> Tensor:
    """[N, ..., B] bytes -> levels [N, ... * 2B]: all low halves of B bytes, then all high ones."""
    return torch.cat((data & 15, data >> 4), dim=-1).flatten(1)


def _bits(data: Tensor, shifts: range | tuple[int, ...], mask: int, dim: int = -1) -> Tensor:
    """The bits `mask` of bytes from each of `shifts` on, along `dim`, which has size 1."""
    return torch.cat([(data >> shift) & mask for shift in shifts], dim=dim)


def _planes(data: Tensor, shifts: range | tuple[int, ...], mask: int, size: int = 32) -> Tensor:
    """[N, blocks, B] bytes -> [N, K]: of each `size` bytes the bits from one shift on, then the next."""
    return _bits(data.reshape(*data.shape[:2], -1, 1, size), shifts, mask, -2).flatten(1)


def _half_at(blocks: Tensor, offset: int) -> Tensor:
    """float16 at a byte of each block [N, G, bytes] -> [N, G] in float32."""
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16)[..., 0].float()


_PLAIN: dict[str, Reader] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}
_PLAIN["MXFP4"] = partial(_mxfp4, coded=False)
_CODED: dict[str, Reader] = {
    "Q5_0": partial(_q5, has_minimum=False),
    "Q5_1": partial(_q5, has_minimum=True),
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k_coded,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": partial(_mxfp4, coded=True),
}
