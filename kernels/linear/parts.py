"""Products with weights whose parts have unlike forms, in torch. `engine/model/reading` packs them so."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.linear.backends import LinearBackend
from kernels.linear.formats import PartedWeight, WeightFormat
from kernels.linear.reference import Product


class PartedProduct:
    """Products of the parts, side by side."""

    def __init__(self, weight: PartedWeight, backend: LinearBackend) -> None:
        self._products = [backend.pack(part) for part in weight.parts]
        self._sizes = [part.shape[0] for part in weight.parts]
        # Some multiply by an order of their own.
        kept = [
            getattr(product, "kept", part) for product, part in zip(self._products, weight.parts, strict=True)
        ]
        self.kept = PartedWeight(parts=tuple(kept))

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [M, K], bias [N] -> [M, N]."""
        biases = [None] * len(self._sizes) if bias is None else torch.split(bias, self._sizes)
        products = zip(self._products, biases, strict=True)
        return torch.cat([product(x, part) for product, part in products], dim=-1)


def pack_any(backend: LinearBackend, weight: WeightFormat | PartedWeight) -> Product:
    """The fastest product with a weight of one form, or of several."""
    return PartedProduct(weight, backend) if isinstance(weight, PartedWeight) else backend.pack(weight)
