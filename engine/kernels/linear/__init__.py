"""Matrix products whose rows do not depend on the batch."""

from engine.kernels.linear.reference import (
    ROW_MULTIPLE,
    PackedProduct,
    PlainProduct,
    Product,
    TiledProduct,
    pack_linear,
)

__all__ = ["ROW_MULTIPLE", "PackedProduct", "PlainProduct", "Product", "TiledProduct", "pack_linear"]
