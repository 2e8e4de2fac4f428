"""Matrix products whose rows do not depend on the batch."""

from engine.kernels.linear.batched import batched_product
from engine.kernels.linear.formats import DenseWeight, Int4Weight, Int8Weight, WeightFormat
from engine.kernels.linear.reference import (
    PackedProduct,
    PlainProduct,
    Product,
    TiledProduct,
    pack_linear,
)
from engine.kernels.linear.rows import ROW_MULTIPLE

__all__ = [
    "ROW_MULTIPLE",
    "DenseWeight",
    "Int4Weight",
    "Int8Weight",
    "PackedProduct",
    "PlainProduct",
    "Product",
    "TiledProduct",
    "WeightFormat",
    "batched_product",
    "pack_linear",
]
