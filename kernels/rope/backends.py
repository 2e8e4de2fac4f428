"""Rotary position embedding. A back end is chosen once, by name."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kernels.paged_cache.store import LayerCache


class RopeBackend(Protocol):
    """What lies between the projections and attention."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        cache: LayerCache,
        *,
        interleaved: bool,
    ) -> Tensor:
        """q [T, H, D] turned by cos and sin [T, R/2]; keys [T, K, D], turned, and values [T, K, E] go to
        `slots` [T] of the cache. q, k and v may be columns of one tensor.
        """


BACKENDS = {
    "torch": "kernels.rope.reference:rotate_and_store",
    "triton": "kernels.rope.triton_rope:rope_and_store",
}
