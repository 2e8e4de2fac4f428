"""Matrix products whose rows do not depend on each other. A back end is chosen once, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.kernels.lazy import lazily

if TYPE_CHECKING:
    from engine.kernels.linear.backends import (
        BACKENDS,
        ROW_MULTIPLE,
        DenseWeight,
        Fp8Weight,
        GroupedProduct,
        Int4Weight,
        Int8Weight,
        LinearBackend,
        PackedProduct,
        PlainProduct,
        Product,
        QuantizedRows,
        QuantizingProduct,
        TiledProduct,
        WeightFormat,
        batched_product,
        pack_linear,
    )

__all__ = [
    "BACKENDS",
    "ROW_MULTIPLE",
    "DenseWeight",
    "Fp8Weight",
    "GroupedProduct",
    "Int4Weight",
    "Int8Weight",
    "LinearBackend",
    "PackedProduct",
    "PlainProduct",
    "Product",
    "QuantizedRows",
    "QuantizingProduct",
    "TiledProduct",
    "WeightFormat",
    "batched_product",
    "pack_linear",
]

__getattr__ = lazily("engine.kernels.linear.backends", __all__)
