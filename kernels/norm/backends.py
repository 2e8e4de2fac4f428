"""Root-mean-square and layer norms. A back end is chosen once, by name."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from kernels.rows import Quantized, QuantizedRows


class RowNorm(NamedTuple):
    """A norm, with what it multiplies by. `centered`: a row's mean is taken away first (layer norms)."""

    # [E] float32; rows of x [T, H, E] may have weights of their own [H, E].
    weight: Tensor
    eps: float
    bias: Tensor | None = None  # [E] float32, added in the end
    centered: bool = False


class NormBackend(Protocol):
    """Norms rows; each independent of the others."""

    def plain(self, x: Tensor, norm: RowNorm) -> Tensor:
        """x [..., E] -> [..., E] in x's type."""

    def added(self, x: Tensor, change: Tensor, norm: RowNorm) -> tuple[Tensor, Tensor]:
        """x and change [T, E] -> their sum in x's type, and the sum normed."""


@runtime_checkable
class QuantizingNorm(NormBackend, Protocol):
    """A back end that rounds what it norms in the same pass."""

    def quantized(
        self, x: Tensor, change: Tensor | None, norm: RowNorm, kind: Quantized, factors: Tensor | None
    ) -> tuple[Tensor, QuantizedRows]:
        """x [T, E], plus change [T, E] where given -> the sum in x's type, and the sum normed, multiplied by
        factors [E] and rounded to `kind`: what `plain` or `added` and rounding afterwards give.
        """


BACKENDS = {
    "torch": "kernels.norm.reference:TorchNorm",
    "triton": "kernels.norm.triton_norm:TritonNorm",
}
