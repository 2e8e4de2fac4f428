"""Root-mean-square and layer norms. A back end is chosen once, by name."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from kernels.rows import Quantized, QuantizedRows


class NormBackend(Protocol):
    """Norms rows; each independent of the others. With `centered` their mean is taken away first (layer
    norms); a bias [E] float32 is added.
    """

    def plain(
        self, x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None, *, centered: bool = False
    ) -> Tensor:
        """x [..., E], weight [E] float32 -> [..., E] in x's type. Rows of x [T, H, E] may have weights of
        their own [H, E].
        """

    def added(
        self,
        x: Tensor,
        change: Tensor,
        weight: Tensor,
        eps: float,
        bias: Tensor | None = None,
        *,
        centered: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """x and change [T, E] -> their sum in x's type, and the sum normed."""


@runtime_checkable
class QuantizingNorm(NormBackend, Protocol):
    """A back end that rounds what it norms in the same pass."""

    def quantized(
        self,
        x: Tensor,
        change: Tensor | None,
        weight: Tensor,
        eps: float,
        kind: Quantized,
        factors: Tensor | None,
        bias: Tensor | None = None,
        *,
        centered: bool = False,
    ) -> tuple[Tensor, QuantizedRows]:
        """x [T, E], plus change [T, E] where given -> the sum in x's type, and the sum normed, multiplied by
        factors [E] and rounded to `kind`: what `plain` or `added` and rounding afterwards give.
        """


BACKENDS = {
    "torch": "kernels.norm.reference:TorchNorm",
    "triton": "kernels.norm.triton_norm:TritonNorm",
}
