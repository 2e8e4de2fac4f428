"""x W^T + b, where each row of the result is bitwise the same whatever other rows there are.

BLAS libraries choose their inner kernel by the number of rows, and different kernels add in different orders.
With the number of rows always a multiple of ROW_MULTIPLE the libraries measured so far (MKL and oneDNN on
x86) stay with one kernel. `pack_linear` proves that for each shape when a weight is packed, and falls back to
tiles of one fixed height, which are invariant by construction.

Shape letters: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear.batched import batched_product
from kernels.linear.formats import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    PartedWeight,
    WeightFormat,
    dense_values,
)
from kernels.linear.quantized import DequantizedProduct, IntegerProduct, RoundedProduct
from kernels.linear.rows import ROW_MULTIPLE

# Numbers of rows that the proof compares: decode batches, and prefill chunks around the libraries' blocks.
PROBED_ROWS = (16, 32, 48, 64, 96, 128, 208, 256, 400, 512)


class Product(Protocol):
    """A packed weight [N, K]."""

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [M, K], bias [N] -> [M, N]. M is a multiple of ROW_MULTIPLE."""


class PlainProduct:
    """One product over all rows, by the library that torch chooses."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        assert x.shape[0] % ROW_MULTIPLE == 0, f"{x.shape[0]} rows"
        return F.linear(x, self.weight, bias)


class PackedProduct:
    """One product over all rows by oneDNN, from a weight in its blocked layout (float32 on a CPU).

    Twice as fast as torch's default on machines where that is MKL without AVX-512 (AMD).
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PROBED_ROWS[0])

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        assert x.shape[0] % ROW_MULTIPLE == 0, f"{x.shape[0]} rows"
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, bias, "none", [], "")
        return out


class TiledProduct:
    """One product for every ROW_MULTIPLE rows: slower, invariant by construction."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        assert x.shape[0] % ROW_MULTIPLE == 0, f"{x.shape[0]} rows"
        return torch.cat([F.linear(tile, self.weight, bias) for tile in torch.split(x, ROW_MULTIPLE)])


_Kind = type[PlainProduct] | type[PackedProduct] | type[TiledProduct]
_proven: dict[tuple[torch.Size, torch.dtype, torch.device, int], _Kind] = {}
_proven_by_piece: dict[tuple[type, tuple[int, int], torch.device, int], bool] = {}


def pack_linear(weight: Tensor | WeightFormat) -> Product:
    """The fastest product whose rows are proven invariant for this shape; the proof runs once per shape."""
    if isinstance(weight, Int8Weight) and weight.activations == "int8":
        return IntegerProduct(weight)
    if isinstance(weight, Fp8Weight):
        return RoundedProduct(weight)
    if isinstance(weight, Int8Weight | Int4Weight):
        return _pack_weight_only(weight)
    values = dense_values(weight)
    key = (values.shape, values.dtype, values.device, torch.get_num_threads())
    if key not in _proven:
        _proven[key] = next(
            kind
            for kind in _candidates(values)
            if kind is TiledProduct or _invariant(kind(values), values.shape[1], values)
        )
    return _proven[key](values)


def _pack_weight_only(weight: Int8Weight | Int4Weight) -> Product:
    like = weight.scale.new_empty(0)
    key = (type(weight), weight.shape, like.device, torch.get_num_threads())
    if key not in _proven_by_piece:
        product = DequantizedProduct(weight, by_tiles=False)
        _proven_by_piece[key] = _invariant(product, weight.shape[1], like)
    return DequantizedProduct(weight, by_tiles=not _proven_by_piece[key])


def _candidates(weight: Tensor) -> list[_Kind]:
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    if on_cpu and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return [PackedProduct, PlainProduct, TiledProduct]
    return [PlainProduct, TiledProduct]


def _invariant(product: Product, num_inputs: int, like: Tensor) -> bool:
    """Whether rows stay bitwise the same in batches of PROBED_ROWS and at other places; inputs of `like`'s
    type.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PROBED_ROWS[-1], num_inputs, generator=generator).to(like.device, like.dtype)
    expected = product(x)
    moved = torch.cat((x[ROW_MULTIPLE + 1 :], x[: ROW_MULTIPLE + 1]))
    return torch.equal(product(moved)[-ROW_MULTIPLE - 1 :], expected[: ROW_MULTIPLE + 1]) and all(
        torch.equal(product(x[:rows]), expected[:rows]) for rows in PROBED_ROWS
    )


class TorchLinear:
    """Products of torch, their rows proven or made independent of the batch."""

    row_multiple = ROW_MULTIPLE

    def pack(self, weight: Tensor | WeightFormat) -> Product:
        """See LinearBackend."""
        return pack_linear(weight)

    def batched(self, left: Tensor, right: Tensor) -> Tensor:
        """See LinearBackend."""
        return batched_product(left, right)

    def grouped(self, weights: Sequence[WeightFormat | PartedWeight]) -> None:
        """See LinearBackend: experts take turns here."""
        return
