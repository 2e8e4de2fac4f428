"""Rotary position embedding in plain torch (arXiv 2104.09864).

Shape letters: T tokens, H heads, D head dim, R rotated dimensions (the first R of D).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.paged_cache.store import LayerCache


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """x [T, H, D] with its first R dimensions turned by the angles of cos and sin [T, R/2], in float32.

    Pairs are (i, i + R/2); with `interleaved` they are (2i, 2i+1) and come out as (i, i + R/2), the order
    that queries and keys share, so that their products are the same.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    turning = x[..., : 2 * half].float()
    if interleaved:
        first, second = turning[..., ::2], turning[..., 1::2]
    else:
        first, second = turning[..., :half], turning[..., half:]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    if x.shape[-1] == 2 * half:
        return turned
    return torch.cat((turned, x[..., 2 * half :]), dim=-1)


def rotate_and_store(
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
    """See RopeBackend: rotation, then the cache's own write."""
    cache.write(rotate(k, cos, sin, interleaved=interleaved), v, slots)
    return rotate(q, cos, sin, interleaved=interleaved)
