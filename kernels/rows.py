"""Rows of numbers rounded to eight bits: what norms hand to products without a way through memory in between.

Shape letters: T rows, E elements of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# Some products with a scale per row read scales of whole tiles.
SCALES_TOGETHER = 256

Quantized = Literal["none", "int8", "fp8"]


@dataclass(frozen=True, kw_only=True)
class QuantizedRows:
    """levels * scale[:, None] is what was rounded."""

    levels: Tensor  # [T, E] int8 or float8_e4m3
    scale: Tensor  # [T] float32
    # Type of the rows before, and of products with them.
    dtype: torch.dtype


def empty_scales(rows: int, device: torch.device) -> Tensor:
    """Room for the scales of so many rows [T] float32, and behind them for those of a tile's rest."""
    return torch.empty(-(-rows // SCALES_TOGETHER) * SCALES_TOGETHER, dtype=torch.float32, device=device)[
        :rows
    ]
