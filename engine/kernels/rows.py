"""Rows of numbers rounded to eight bits: what norms hand to products without a way through memory in between.

Shape letters: T rows, E elements of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Quantized = Literal["none", "int8", "fp8"]


@dataclass(frozen=True, kw_only=True)
class QuantizedRows:
    """levels * scale[:, None] is what was rounded."""

    levels: Tensor  # [T, E] int8 or float8_e4m3
    scale: Tensor  # [T] float32
    # Type of the rows before, and of products with them.
    dtype: torch.dtype
