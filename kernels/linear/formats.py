"""What a weight of a linear layer is, in plain data: the contract between those who read or make quantized
weights and those who multiply by them.

Every format says what number stands at [n, k] of the weight; `dequantize` computes it and is the
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
from itertools import groupby
from typing import Any, Literal

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

    With `rounds_inputs` inputs are rounded to fp8, too: each token's divided by their largest magnitude /
    448, or each token's 128 neighbours where the weight has blocks (K is a multiple of 128 then). CPUs take
    them as they are.
    """

    values: Tensor  # [N, K] float8_e4m3fn
    scale: Tensor  # [N] or [N/128, K/128], rounded up, float32
    rounds_inputs: bool = True

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


@dataclass(frozen=True, kw_only=True)
class CodedWeight:
    """A weight in codes of 2 to 6 bits by groups whose factors are small themselves (K-quants, IQ4, MXFP4).

    number[n, k] = book[codes[n, k]] * scales[n, g(k)] - minima[n, g(k)], with scales[n, g] = step[n, g] *
    scale[n, s(g)] and minima[n, g] = low[n, g] * minimum[n, s(g)], all rounded to float32. A span s is some
    neighbouring groups; no steps, or no lows, are ones.
    """

    codes: Tensor  # [N, K] uint8
    bits: int  # of a code
    book: tuple[int, ...]  # what each of the 2^bits codes stands for, -128 to 127
    scale: Tensor  # [N, S] float32
    # [N, G]: int8; uint8 that means two to it less 127 (e8m0, 1 to 254); or float8_e4m3fn.
    step: Tensor | None = None
    minimum: Tensor | None = None  # [N, S] float32
    low: Tensor | None = None  # [N, G] int8

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def has_levels(self) -> bool:
        """Whether what codes stand for is themselves, less a number."""
        return self.book == tuple(range(self.book[0], self.book[0] + len(self.book)))

    @property
    def num_groups(self) -> int:
        """Groups of each output."""
        return (self.scale if self.step is None else self.step).shape[1]

    def scales(self) -> Tensor:
        """What each group is multiplied by [N, G], in float32."""
        if self.step is None:
            return self.scale
        if self.step.dtype == torch.uint8:
            steps = (self.step.int() << 23).view(torch.float32)
        else:
            steps = self.step.float()
        return self.scale.repeat_interleave(self.num_groups // self.scale.shape[1], 1) * steps

    def minima(self) -> Tensor | None:
        """What is taken from each group [N, G], in float32; None where nothing is."""
        if self.minimum is None:
            return None
        wide = self.minimum.repeat_interleave(self.num_groups // self.minimum.shape[1], 1)
        return wide if self.low is None else wide * self.low.float()

    def dequantize(self) -> Tensor:
        """The weight [N, K] in float32."""
        values = torch.tensor(self.book, dtype=torch.float32, device=self.codes.device)[self.codes.long()]
        minima = self.minima()
        return _by_group(values, self.scales(), None if minima is None else -minima)


@dataclass(frozen=True, kw_only=True)
class FloatCodedWeight:
    """A weight in 4-bit codes of floats: number[n, k] = book[codes[n, k]] * scale[n, g(k)] (NF4, FP4)."""

    codes: Tensor  # [N, K] uint8
    book: Tensor  # [16] float32
    scale: Tensor  # [N, G] float32

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> Tensor:
        """The weight [N, K] in float32."""
        return _by_group(self.book[self.codes.long()], self.scale, None)


WeightFormat = DenseWeight | Int8Weight | Int4Weight | Fp8Weight | CodedWeight | FloatCodedWeight


def pack_levels(levels: Tensor) -> Tensor:
    """Levels [N, K] of 0 to 15 -> bytes [N, K/2] as Int4Weight stores them."""
    levels = levels.to(torch.uint8)
    return (levels[:, 0::2] | (levels[:, 1::2] << 4)).contiguous()


# Tensors of a format whose first dimension is outputs.
_OF_OUTPUTS = ("values", "packed", "codes", "scale", "step", "minimum", "low")


def rows_of(weight: WeightFormat, part: slice | Tensor) -> WeightFormat:
    """Some outputs of a weight: a slice (views), or those that a tensor of indices names."""
    assert not (isinstance(weight, Fp8Weight) and weight.blocked), "outputs of a block share a scale"
    parts = {name: getattr(weight, name, None) for name in _OF_OUTPUTS}
    kept: dict[str, Any] = {
        name: _picked(values, part) for name, values in parts.items() if values is not None
    }
    return replace(weight, **kept)


def _picked(values: Tensor, part: slice | Tensor) -> Tensor:
    if values.dtype not in FP8_NOT_FINITE:
        return values[part]
    # Bytes, as fp8 cannot be indexed everywhere.
    return values.view(torch.uint8)[part].view(values.dtype)


def dense_values(weight: Tensor | DenseWeight | CodedWeight | FloatCodedWeight) -> Tensor:
    """What a product of floats is made with; codes, which only native kernels take, are dequantized."""
    if isinstance(weight, Tensor):
        return weight
    return weight.dequantize()


def scales_of(weight: WeightFormat) -> list[Tensor]:
    """Scales and minima of a quantized weight."""
    found = (getattr(weight, name, None) for name in ("scale", "step", "minimum", "low"))
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


@dataclass(frozen=True, kw_only=True)
class PartedWeight:
    """Outputs one after another, of forms that no single one holds without growing: products are made part by
    part.
    """

    parts: tuple[WeightFormat, ...]  # two or more, of equal K

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def dequantize(self) -> Tensor:
        """The weight [N, K] in float32."""
        return torch.cat([part.dequantize().float() for part in self.parts])


def parts_of(weight: WeightFormat | PartedWeight) -> tuple[WeightFormat, ...]:
    """What of a weight has one form."""
    return weight.parts if isinstance(weight, PartedWeight) else (weight,)


def stack(weights: Sequence[WeightFormat], dtype: torch.dtype) -> WeightFormat | PartedWeight:
    """One weight with the outputs of all of them (equal K), first to last.

    Neighbours of one form become one; dense ones of several types are of `dtype` then. The others stay apart.
    """
    runs: list[list[WeightFormat]] = []
    for weight in weights:
        if runs and _have_one_form(runs[-1][-1], weight):
            runs[-1].append(weight)
        else:
            runs.append([weight])
    found = [_one_of(run, dtype) for run in runs]
    return found[0] if len(found) == 1 else PartedWeight(parts=tuple(found))


def _one_of(weights: Sequence[WeightFormat], dtype: torch.dtype) -> WeightFormat:
    """One weight of several that have one form."""
    first = weights[0]
    if len(weights) == 1:
        return first
    dense = [weight.values for weight in weights if isinstance(weight, DenseWeight)]
    if len({values.dtype for values in dense}) > 1:
        return DenseWeight(values=torch.cat([values.to(dtype) for values in dense]))
    parts: dict[str, Any] = {
        name: _joined([getattr(weight, name) for weight in weights])
        for name in _OF_OUTPUTS
        if getattr(first, name, None) is not None
    }
    return replace(first, **parts)


def _have_one_form(left: Any, right: Any) -> bool:
    """Whether one weight can have the outputs of both."""
    if type(left) is not type(right):
        return False
    if isinstance(left, DenseWeight):
        return True
    shared = ("activations", "order", "smoothing", "book", "blocked", "rounds_inputs")
    alike = all(_same(getattr(left, name, None), getattr(right, name, None)) for name in shared)
    if isinstance(left, Fp8Weight):
        return alike and not (left.blocked and left.shape[0] % FP8_BLOCK)
    return alike and _forms(left) == _forms(right)


def _forms(weight: WeightFormat) -> list[tuple[int, torch.dtype] | None]:
    """Groups, or spans, and types of what a weight is scaled by."""
    parts = [getattr(weight, name, None) for name in ("scale", "step", "minimum", "low")]
    return [None if part is None else (part.shape[1], part.dtype) for part in parts]


def picked_rows(
    parts: Sequence[WeightFormat], rows: Tensor, dtype: torch.dtype
) -> WeightFormat | PartedWeight:
    """Some outputs of a weight of these parts, in the order in which `rows` [R] names them."""
    begins = torch.tensor([0, *(part.shape[0] for part in parts)]).cumsum(0).to(rows.device)
    owners = torch.bucketize(rows, begins[1:], right=True).tolist()
    found, first = [], 0
    for owner, run in groupby(owners):
        last = first + len(list(run))
        found.append(rows_of(parts[owner], rows[first:last] - begins[owner]))
        first = last
    return stack(found, dtype)


def with_minimum(weight: Int4Weight) -> Int4Weight:
    """The same weight with minima."""
    return weight if weight.minimum is not None else replace(weight, minimum=-INT4_MIDDLE * weight.scale)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    if parts[0].dtype not in FP8_NOT_FINITE:
        return torch.cat(list(parts))
    # Bytes, as fp8 cannot be joined everywhere.
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return left is right if isinstance(left, Tensor) or isinstance(right, Tensor) else bool(left == right)


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
