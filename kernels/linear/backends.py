"""Matrix products whose rows do not depend on each other. A back end is chosen once, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from kernels.linear.formats import PartedWeight, WeightFormat
from kernels.linear.reference import (
    Product,
)
from kernels.rows import Quantized, QuantizedRows


class QuantizingProduct(Product, Protocol):
    """A product whose inputs are rounded row by row, and may come rounded already."""

    # "none" where they must be rounded here.
    quantizes: Quantized
    # Factors of the inputs, applied before the product, [K] float32.
    factors: Tensor | None

    def of_rows(self, rows: QuantizedRows, bias: Tensor | None = None) -> Tensor:
        """rows [M, K], bias [N] -> [M, N] in the type that the rows had."""


class GroupedProduct(Protocol):
    """Products of rows with the weights that each of them chose."""

    def group(self, choice: Tensor) -> Any:
        """choice [R] int32, the weight of each row: sorted, for any product with as many weights. No
        synchronization with the host.
        """

    def __call__(
        self,
        x: Tensor,
        groups: Any,
        *,
        rows_per_input: int,
        bias: Tensor | None = None,
        gate: str | None = None,
    ) -> Tensor:
        """x [M, K], groups of R rows, bias [X * N] of all weights -> [R, N], row r being
        x[r // rows_per_input] times its weight; with a gate (activation.GATES) [R, N / 2], the first half
        of the outputs being what it is applied to. No synchronization with the host.
        """


class LinearBackend(Protocol):
    """Packs weights into products."""

    # Rows of a product must be a multiple of this.
    row_multiple: int

    def pack(self, weight: Tensor | WeightFormat) -> Product:
        """The fastest product with a weight [N, K]."""

    def batched(self, left: Tensor, right: Tensor) -> Tensor:
        """left [B, M, K], right [B, K, N] -> [B, M, N]."""

    def grouped(self, weights: Sequence[WeightFormat | PartedWeight]) -> GroupedProduct | None:
        """The product with one of several weights [N, K] per row, or None where rows must be sorted on the
        host.
        """


BACKENDS = {
    "torch": "kernels.linear.reference:TorchLinear",
    "triton": "kernels.linear.triton_backend:TritonLinear",
    "invariant": "kernels.linear.triton_backend:InvariantLinear",
}
