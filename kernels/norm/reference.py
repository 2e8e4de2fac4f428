"""Root-mean-square and layer norms in plain torch. Shape letters: T tokens, E elements of the last axis."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.norm.backends import RowNorm


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None, *, centered: bool = False
) -> Tensor:
    """x [..., E] divided by its root mean square and scaled by weight [E], or [..., E] where rows have their
    own; a layer norm is the same of what is `centered`, with a bias [E]. Computed in float32, rows
    independent.

    The weight multiplies in float32 as well, before rounding to x's type.
    """
    wide = x.float()
    if centered:
        wide = wide - wide.mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
    return (normed if bias is None else normed + bias).to(x.dtype)


class TorchNorm:
    """The formula, operation by operation."""

    def plain(self, x: Tensor, norm: RowNorm) -> Tensor:
        """See NormBackend."""
        return rms_norm(x, norm.weight, norm.eps, norm.bias, centered=norm.centered)

    def added(self, x: Tensor, change: Tensor, norm: RowNorm) -> tuple[Tensor, Tensor]:
        """See NormBackend."""
        stream = x + change
        return stream, self.plain(stream, norm)
