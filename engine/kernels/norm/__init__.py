"""Root-mean-square norm. A back end is chosen once, by name."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine.kernels.norm.reference import rms_norm


class NormBackend(Protocol):
    """Norms rows; each independent of the others."""

    name: str

    def plain(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., E], weight [E] float32 -> [..., E] in x's type."""

    def added(self, x: Tensor, change: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x and change [T, E] -> their sum in x's type, and the sum normed."""


BACKENDS = {
    "torch": "engine.kernels.norm.reference:TorchNorm",
    "triton": "engine.kernels.norm.triton_norm:TritonNorm",
}

__all__ = ["BACKENDS", "NormBackend", "rms_norm"]
