"""Root-mean-square norm in plain torch. Shape letters: T tokens, E elements of the last axis."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., E] divided by its root mean square and scaled by weight [E]. Computed in float32, rows
    independent.

    The weight multiplies in float32 as well, before rounding to x's type.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight).to(x.dtype)


class TorchNorm:
    """The formula, operation by operation."""

    def plain(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See NormBackend."""
        return rms_norm(x, weight, eps)

    def added(self, x: Tensor, change: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See NormBackend."""
        stream = x + change
        return stream, rms_norm(stream, weight, eps)
