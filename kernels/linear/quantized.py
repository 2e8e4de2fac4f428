"""Products with quantized weights in torch: the oracle of faster back ends, and what serves without them.

Rows are independent as in reference.py. Weight-only products compute in float32, from a weight that is
dequantized piece by piece in every call. Products of int8 with int8 are exact in int32, so their rows cannot
depend on anything else.

Shape letters: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear.formats import FP8_BLOCK, FP8_LIMIT, Fp8Weight, Int4Weight, Int8Weight, rows_of
from kernels.linear.rows import ROW_MULTIPLE

INT8_LIMIT = 127.0
# Elements of the weight that are dequantized at once: 4 MiB in float32 stay in a core's cache.
PIECE_ELEMENTS = 1 << 20


class DequantizedProduct:
    """Inputs in floating point, weights dequantized on the way; results of float32 precision."""

    def __init__(self, weight: Int8Weight | Int4Weight, *, by_tiles: bool) -> None:
        self.weight = weight
        # Each ROW_MULTIPLE rows are a product of their own: invariant by construction, and slower.
        self.by_tiles = by_tiles

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        assert x.shape[0] % ROW_MULTIPLE == 0, f"{x.shape[0]} rows"
        inputs = arranged(x, self.weight)
        tiles = torch.split(inputs, ROW_MULTIPLE) if self.by_tiles else (inputs,)
        columns = [torch.cat([F.linear(tile, piece) for tile in tiles]) for piece in self._pieces()]
        out = torch.cat(columns, dim=1)
        return (out if bias is None else out + bias.float()).to(x.dtype)

    def _pieces(self) -> Iterator[Tensor]:
        num_outputs, num_inputs = self.weight.shape
        step = max(1, PIECE_ELEMENTS // num_inputs)
        for start in range(0, num_outputs, step):
            piece = rows_of(self.weight, slice(start, start + step))
            assert isinstance(piece, Int8Weight | Int4Weight)
            yield piece.stored()


class IntegerProduct:
    """Inputs rounded to int8, one scale per row (W8A8)."""

    def __init__(self, weight: Int8Weight) -> None:
        assert weight.scale.shape[1] == 1, "int8 activations need one scale per output"
        self.weight = weight
        self.transposed = weight.values.t()  # [K, N]
        self.scale = weight.scale[:, 0]

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        assert x.shape[0] % ROW_MULTIPLE == 0, f"{x.shape[0]} rows"
        levels, row_scale = quantize_rows(arranged(x, self.weight))
        if integer_products_are_exact(x.device):
            total = torch._int_mm(levels, self.transposed)  # [M, N] int32
        else:
            total = levels.double() @ self.transposed.double()
        out = total.float() * (row_scale[:, None] * self.scale)
        return (out if bias is None else out + bias.float()).to(x.dtype)


@cache
def integer_products_are_exact(device: torch.device) -> bool:
    """Whether torch's product of int8 matrices is: some libraries saturate at 16 bits on processors without
    VNNI. Proven once, at the largest magnitudes.
    """
    largest = torch.full((ROW_MULTIPLE, 64), 127, dtype=torch.int8, device=device)
    return all(
        bool((torch._int_mm(left, right.t()) == 64 * 127 * 127 * sign).all())
        for left, right, sign in ((largest, largest, 1), (largest, -largest, -1), (-largest, -largest, 1))
    )


class RoundedProduct:
    """fp8 inputs with fp8 weights, computed in float32 from what the rounded numbers stand for."""

    def __init__(self, weight: Fp8Weight) -> None:
        self.weight = weight
        self.dense = weight.dequantize()

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [M, K] -> [M, N] in x's type. M is a multiple of ROW_MULTIPLE."""
        assert x.shape[0] % ROW_MULTIPLE == 0, f"{x.shape[0]} rows"
        levels, scale = fp8_rows(x, blocked=self.weight.blocked)
        size = FP8_BLOCK if self.weight.blocked else x.shape[1]
        rounded = levels.float().view(x.shape[0], -1, size) * scale.view(x.shape[0], -1)[..., None]
        tiles = torch.split(rounded.flatten(1), ROW_MULTIPLE)
        wide_bias = None if bias is None else bias.float()
        return torch.cat([F.linear(tile, self.dense, wide_bias) for tile in tiles]).to(x.dtype)


def fp8_rows(x: Tensor, *, blocked: bool) -> tuple[Tensor, Tensor]:
    """x [M, K] -> float8_e4m3 [M, K] and scales [M], or [M, K/128] by blocks of inputs. A row (or block) with
    NaN or infinity keeps a non-finite scale.
    """
    parts = x.float().view(x.shape[0], -1, FP8_BLOCK if blocked else x.shape[1])
    scale = parts.abs().amax(-1, keepdim=True) / FP8_LIMIT
    safe = torch.where((scale > 0) & scale.isfinite(), scale, torch.ones_like(scale))
    levels = torch.nan_to_num(parts / safe).clamp(-FP8_LIMIT, FP8_LIMIT).to(torch.float8_e4m3fn)
    return levels.flatten(1), scale[..., 0] if blocked else scale[:, 0, 0]


def arranged(x: Tensor, weight: Int8Weight | Int4Weight) -> Tensor:
    """x [M, K] in float32 as the stored weight wants it: smoothed, and in stored order."""
    wide = x.float()
    if isinstance(weight, Int8Weight) and weight.smoothing is not None:
        wide = wide * weight.smoothing
    return wide if weight.order is None else wide.index_select(1, weight.order)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] float32 -> int8 [M, K] and scales [M]: the largest magnitude maps to 127, rounding is half to
    even. A row with NaN or infinity keeps a non-finite scale, so that its result is not finite either.
    """
    scale = x.abs().amax(-1) / INT8_LIMIT
    safe = torch.where((scale > 0) & scale.isfinite(), scale, torch.ones_like(scale))
    levels = torch.nan_to_num(x / safe[:, None]).round().clamp(-INT8_LIMIT, INT8_LIMIT)
    return levels.to(torch.int8), scale
