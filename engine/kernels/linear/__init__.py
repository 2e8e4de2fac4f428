"""Matrix products whose rows do not depend on the batch."""

from engine.kernels.linear.batched import batched_product
from engine.kernels.linear.reference import (
    ROW_MULTIPLE,
    PackedProduct,
    PlainProduct,
    Product,
    TiledProduct,
    pack_linear,
)

__all__ = [
    "ROW_MULTIPLE",
    "PackedProduct",
    "PlainProduct",
    "Product",
    "TiledProduct",
    "batched_product",
    "pack_linear",
]
