"""Keys in four bits by channel (KIVI, arXiv 2402.02750), in plain torch: the oracle of key_groups.cc and
of Triton.

A channel of keys keeps to its own range, which may be far from zero: rounded with the other channels of its
token it takes their levels, rounded with the other tokens of its block it has 16 of its own. A block's newest
keys are whole, since its range is known when it is full; so a query sees its own block's keys in bfloat16,
and those of the blocks before it rounded, however its history was cut into steps.

Shape letters: G tokens of a block, D elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.paged_cache import four_bits


def quantize(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys [..., G, D] -> bytes [..., G, D / 2], and middles and halves of steps [..., D] in bfloat16."""
    wide = keys.float()
    least, most = wide.amin(-2), wide.amax(-2)
    middle = (least * 0.5 + most * 0.5).bfloat16()
    half = (torch.maximum(most - middle, middle - least) / four_bits.LIMIT).bfloat16()
    step = torch.where(half > 0, half, torch.ones_like(half)).float()
    levels = (wide - middle.float()[..., None, :]) / step[..., None, :]
    codes = ((levels + four_bits.LIMIT) * 0.5).round().clamp(0, four_bits.LIMIT)
    return four_bits.pack(codes), middle, half


def dequantize(packed: Tensor, middle: Tensor, half: Tensor) -> Tensor:
    """What `quantize` was given, nearly: [..., G, D] in float32."""
    return four_bits.levels_of(packed) * half.float()[..., None, :] + middle.float()[..., None, :]
