"""Matrix products whose rows do not depend on the batch."""

from engine.kernels.linear.reference import (
    ROW_MULTIPLE,
    LinearKernel,
    choose_linear,
    padded_linear,
    tiled_linear,
)

__all__ = ["ROW_MULTIPLE", "LinearKernel", "choose_linear", "padded_linear", "tiled_linear"]
