"""What a weight of a linear layer is, in plain data: the contract between those who read or make quantized
weights and those who multiply by them.

Every format says what number stands in place [n, k] of the weight; `dequantize` computes it and is the
oracle. How a back end packs these tensors for its own kernels is its own business, and nothing here is packed
for speed.

`order` is for checkpoints that quantize inputs in the order of their importance (GPTQ's desc_act): stored
column j belongs to input order[j], so a product gathers x[:, order] once and goes on as if nothing was
permuted. `smoothing` (SmoothQuant, arXiv 2211.10438) is what inputs are multiplied by before they are rounded
to int8; the stored weight is divided by it already. Both are given in the inputs' own order.

Shape letters: N outputs, K inputs, G groups of K/G neighbouring (stored) inputs each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

# Level of a symmetric 4-bit weight that stands for zero.
INT4_MIDDLE = 8
# Inputs, and outputs, that share a scale in fp8 weights by blocks; largest magnitude of float8_e4m3.
FP8_BLOCK = 128
FP8_LIMIT = 448.0
# Smallest magnitude, as a number of 7 bits, that is not finite.
FP8_NOT_FINITE = {torch.float8_e4m3fn: 127, torch.float8_e5m2: 124}

Activations = Literal["float", "int8"]


@dataclass(frozen=True, kw_only=True)
class DenseWeight:
    """A weight in a floating-point type."""

    values: Tensor  # [N, K]

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.values.shape[0], self.values.shape[1]

    def dequantize(self) -> Tensor:
        """The weight [N, K]."""
        return self.values


@dataclass(frozen=True, kw_only=True)
class Int8Weight:
    """stored[n, j] = values[n, j] * scale[n, g(j)].

    G = 1 is one scale per output. `activations` says how inputs enter the product: "float" (W8A16, inputs in
    the type they come in), or "int8" (W8A8: each token's inputs are divided by their largest magnitude / 127
    and rounded half to even; only with G = 1).
    """

    values: Tensor  # [N, K] int8, -127 to 127 (-128 occurs in checkpoints made by others)
    scale: Tensor  # [N, G] float32
    smoothing: Tensor | None = None  # [K] float32
    order: Tensor | None = None  # [K] int64
    activations: Activations = "float"

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def group_size(self) -> int:
        """Stored inputs that share a scale; K when there is one scale per output."""
        return self.shape[1] // self.scale.shape[1]

    def stored(self) -> Tensor:
        """The stored weight [N, K] in float32: in stored order, smoothing not undone."""
        return _by_group(self.values.float(), self.scale, None)

    def dequantize(self) -> Tensor:
        """The weight [N, K] in float32, by which unchanged inputs are multiplied."""
        weight = _in_input_order(self.stored(), self.order)
        return weight if self.smoothing is None else weight * self.smoothing


@dataclass(frozen=True, kw_only=True)
class Int4Weight:
    """stored[n, j] = level[n, j] * scale[n, g(j)] + minimum[n, g(j)], levels 0 to 15, two in a byte.

    Byte [n, j/2] holds the level of even j in its low four bits and of the odd j after it in its high four.
    No minimum means -INT4_MIDDLE * scale: symmetric. K is even and a multiple of the group size.
    """

    packed: Tensor  # [N, K/2] uint8
    scale: Tensor  # [N, G] float32
    minimum: Tensor | None = None  # [N, G] float32
    order: Tensor | None = None  # [K] int64

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.packed.shape[0], 2 * self.packed.shape[1]

    @property
    def group_size(self) -> int:
        """Stored inputs that share a scale."""
        return self.shape[1] // self.scale.shape[1]

    def levels(self) -> Tensor:
        """Levels [N, K] as uint8, in stored order."""
        return torch.stack((self.packed & 15, self.packed >> 4), dim=-1).flatten(1)

    def stored(self) -> Tensor:
        """The weight [N, K] in float32, in stored order."""
        minimum = self.minimum
        if minimum is None:
            return _by_group(self.levels().float() - INT4_MIDDLE, self.scale, None)
        return _by_group(self.levels().float(), self.scale, minimum)

    def dequantize(self) -> Tensor:
        """The weight [N, K] in float32."""
        return _in_input_order(self.stored(), self.order)


@dataclass(frozen=True, kw_only=True)
class Fp8Weight:
    """stored[n, k] = values[n, k] * scale[n], or * scale[n / 128, k / 128] (DeepSeek-V3, arXiv 2412.19437).

    Inputs are rounded to fp8, too: each token's divided by their largest magnitude / 448, or each token's
    128 neighbours where the weight has blocks (K is a multiple of 128 then).
    """

    values: Tensor  # [N, K] float8_e4m3fn
    scale: Tensor  # [N] or [N/128, K/128], rounded up, float32

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def blocked(self) -> bool:
        """Whether scales are by blocks."""
        return self.scale.dim() == 2

    def dequantize(self) -> Tensor:
        """The weight [N, K] in float32."""
        wide = self.values.float()
        if not self.blocked:
            return wide * self.scale[:, None]
        scale = self.scale.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
        return wide * scale[: self.shape[0], : self.shape[1]]


WeightFormat = DenseWeight | Int8Weight | Int4Weight | Fp8Weight


def pack_levels(levels: Tensor) -> Tensor:
    """Levels [N, K] of 0 to 15 -> bytes [N, K/2] as Int4Weight stores them."""
    levels = levels.to(torch.uint8)
    return (levels[:, 0::2] | (levels[:, 1::2] << 4)).contiguous()


def rows_of(weight: WeightFormat, part: slice | Tensor) -> WeightFormat:
    """Some outputs of a weight: a slice (views), or those that a tensor of indices names."""
    if isinstance(weight, DenseWeight):
        return DenseWeight(values=weight.values[part])
    if isinstance(weight, Int8Weight):
        return replace(weight, values=weight.values[part], scale=weight.scale[part])
    if isinstance(weight, Fp8Weight):
        assert not weight.blocked, "outputs of a block share a scale"
        # Bytes, as fp8 cannot be indexed everywhere.
        values = weight.values.view(torch.uint8)[part].view(weight.values.dtype)
        return Fp8Weight(values=values, scale=weight.scale[part])
    minimum = None if weight.minimum is None else weight.minimum[part]
    return replace(weight, packed=weight.packed[part], scale=weight.scale[part], minimum=minimum)


def scales_of(weight: WeightFormat) -> list[Tensor]:
    """Scales and minima of a quantized weight."""
    found = (getattr(weight, name, None) for name in ("scale", "minimum"))
    return [tensor for tensor in found if tensor is not None]


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers of a stored tensor are, in one pass at the speed of memory."""
    if tensor.dtype in FP8_NOT_FINITE:
        magnitudes = tensor.view(torch.uint8) & 127
        return not bool((magnitudes >= FP8_NOT_FINITE[tensor.dtype]).any())
    if not tensor.dtype.is_floating_point:
        return True
    # One that is not finite makes the sum so; a sum may also be too large for the type.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def stack(weights: Sequence[WeightFormat], dtype: torch.dtype) -> WeightFormat:
    """One weight with the outputs of all of them (equal K), first to last.

    Weights that have no common form (other groups, other orders, one of them dense) are dequantized to
    `dtype`.
    """
    if len(weights) == 1:
        return weights[0]
    if all(isinstance(weight, Int8Weight) for weight in weights):
        stacked: WeightFormat | None = _stack_int8([w for w in weights if isinstance(w, Int8Weight)])
    elif all(isinstance(weight, Int4Weight) for weight in weights):
        stacked = _stack_int4([w for w in weights if isinstance(w, Int4Weight)])
    elif all(isinstance(weight, Fp8Weight) for weight in weights):
        stacked = _stack_fp8([w for w in weights if isinstance(w, Fp8Weight)])
    else:
        stacked = _stack_dense([w for w in weights if isinstance(w, DenseWeight)], len(weights))
    if stacked is not None:
        return stacked
    return DenseWeight(values=torch.cat([weight.dequantize().to(dtype) for weight in weights]))


def _stack_dense(weights: list[DenseWeight], count: int) -> DenseWeight | None:
    alike = len(weights) == count and len({weight.values.dtype for weight in weights}) == 1
    return DenseWeight(values=torch.cat([w.values for w in weights])) if alike else None


def _stack_int8(weights: list[Int8Weight]) -> Int8Weight | None:
    first = weights[0]
    alike = all(
        weight.activations == first.activations
        and weight.scale.shape[1] == first.scale.shape[1]
        and _same(weight.order, first.order)
        and _same(weight.smoothing, first.smoothing)
        for weight in weights
    )
    if not alike:
        return None
    values, scale = torch.cat([w.values for w in weights]), torch.cat([w.scale for w in weights])
    return replace(first, values=values, scale=scale)


def _stack_int4(weights: list[Int4Weight]) -> Int4Weight | None:
    first = weights[0]
    alike = all(
        weight.scale.shape[1] == first.scale.shape[1] and _same(weight.order, first.order)
        for weight in weights
    )
    if not alike:
        return None
    minimum: Tensor | None = None
    if any(weight.minimum is not None for weight in weights):
        minimum = torch.cat([-INT4_MIDDLE * w.scale if w.minimum is None else w.minimum for w in weights])
    packed, scale = torch.cat([w.packed for w in weights]), torch.cat([w.scale for w in weights])
    return replace(first, packed=packed, scale=scale, minimum=minimum)


def _stack_fp8(weights: list[Fp8Weight]) -> Fp8Weight | None:
    blocked = weights[0].blocked
    alike = all(
        weight.blocked == blocked and not (blocked and weight.shape[0] % FP8_BLOCK) for weight in weights
    )
    if not alike:
        return None
    values = torch.cat([w.values.view(torch.uint8) for w in weights]).view(weights[0].values.dtype)
    return Fp8Weight(values=values, scale=torch.cat([w.scale for w in weights]))


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return torch.equal(left, right)


def _by_group(values: Tensor, scale: Tensor, minimum: Tensor | None) -> Tensor:
    """values [N, K] times its group's scale [N, G], plus its group's minimum."""
    grouped = values.view(*scale.shape, -1) * scale[..., None]
    if minimum is not None:
        grouped = grouped + minimum[..., None]
    return grouped.flatten(1)


def _in_input_order(stored: Tensor, order: Tensor | None) -> Tensor:
    if order is None:
        return stored
    weight = torch.empty_like(stored)
    weight[:, order] = stored
    return weight
