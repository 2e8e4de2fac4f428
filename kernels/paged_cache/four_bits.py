"""Vectors in four bits: rotated, so that no element stands out, then rounded to one of 16 levels.

Elements that stand out would take all levels for themselves. Rotated by a Hadamard matrix (QuaRot, arXiv
2404.00456) a vector's elements are alike, close to normally distributed, and the largest one is where a
quantizer of 16 levels should end: one scale serves the whole vector, with nothing beside it. So values are
kept; weighted sums of rotated ones are rotated back, once.

Before that, elements get the signs of the Rudin-Shapiro sequence, whose Hadamard transform is flat: so is
then that of a vector which a Hadamard matrix by itself would gather in one element, such as a constant one.

Keys have outliers in the same channels of every token, and lose far less where each channel has levels of its
own (`key_groups`, `python -m benchmarks.kv_channels`).

A code c from 0 to 15 stands for (2 c - 15) times the scale. Of each 8 elements, the first four are the low
halves of four bytes, the others their high halves.

Shape letters: D elements, a multiple of 8.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

# What vectors are a multiple of.
GROUP = 8
# The highest level.
LIMIT = 15.0


def turn(x: Tensor) -> Tensor:
    """x [..., D] rotated, in blocks of the largest power of two that divides D. A row's bits do not depend on
    the others.
    """
    return _hadamard(x * _signs(x.shape[-1], x.dtype, x.device))


def turn_back(x: Tensor) -> Tensor:
    """Undoes `turn`."""
    return _hadamard(x) * _signs(x.shape[-1], x.dtype, x.device)


@cache
def _signs(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[D], of the Rudin-Shapiro sequence: how often two ones are neighbours in an index decides."""
    signs = [1.0 - 2.0 * ((index & index >> 1).bit_count() % 2) for index in range(size)]
    return torch.tensor(signs, dtype=dtype, device=device)


def _hadamard(x: Tensor) -> Tensor:
    size = x.shape[-1]
    block, half = size & -size, 1
    while half < block:
        pairs = x.reshape(*x.shape[:-1], size // (2 * half), 2, half)
        a, b = pairs.unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        half *= 2
    scaled: Tensor = x * block**-0.5
    return scaled


def pack(codes: Tensor) -> Tensor:
    """codes [..., D] from 0 to 15 -> bytes [..., D / 2]."""
    low, high = codes.to(torch.uint8).reshape(*codes.shape[:-1], -1, 2, GROUP // 2).unbind(-2)
    packed: Tensor = low | high << 4
    return packed.flatten(-2)


def levels_of(packed: Tensor) -> Tensor:
    """bytes [..., D / 2] -> levels [..., D] in float32, odd numbers from -15 to 15."""
    halves = packed.reshape(*packed.shape[:-1], -1, GROUP // 2)
    codes = torch.stack((halves & 15, halves >> 4), dim=-2).flatten(-3)
    return codes.float() * 2 - LIMIT


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] -> bytes [..., D / 2] and scales [...]. A vector with NaN or infinity keeps a non-finite
    scale.
    """
    turned = turn(x.float())
    scale = turned.abs().amax(-1) / LIMIT
    safe = torch.where((scale > 0) & scale.isfinite(), scale, torch.ones_like(scale))
    codes = (torch.nan_to_num(turned / safe[..., None]).clamp(-LIMIT, LIMIT) + LIMIT) * 0.5
    return pack(codes.round()), scale


def dequantize(packed: Tensor, scale: Tensor) -> Tensor:
    """What `quantize` was given, nearly: bytes [..., D / 2], scales [...] -> [..., D] in float32."""
    return turn_back(levels_of(packed) * scale[..., None])
