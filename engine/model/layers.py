"""Torch's computation of what every family's layers are made of, from their records.

Shape letters: T tokens, E hidden size, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from engine.kernels.attention import AttentionBackend
from engine.kernels.linear import QuantizedRows, QuantizingProduct
from engine.kernels.norm import QuantizingNorm
from engine.kernels.paged_cache import LayerCache
from engine.kernels.selection import Kernels
from engine.model.records import Attention, FeedForward, Linear, Norm


@dataclass(kw_only=True)
class StepContext:
    """What all layers of one forward share."""

    kernels: Kernels
    slots: Tensor  # [T]
    # Angles of this step's tokens for each rotation of the model: cos and sin [T, R/2].
    rotations: list[tuple[Tensor, Tensor]]
    attention: AttentionBackend
    attention_plan: Any


def multiply(linear: Linear, x: Tensor | QuantizedRows) -> Tensor:
    """x [T, inputs], rounded already or not -> [T, outputs]."""
    if isinstance(x, QuantizedRows):
        return cast("QuantizingProduct", linear.product).of_rows(x, linear.bias)
    product: Tensor = linear.product(x, linear.bias)
    return product


def normed(norm: Norm, x: Tensor, kernels: Kernels) -> Tensor:
    """x [..., size] -> the same shape."""
    return kernels.norm.plain(x, cast("Tensor", norm.weight), norm.eps)


def entering(
    norm: Norm, x: Tensor, change: Tensor | None, entry: Linear | None, kernels: Kernels
) -> tuple[Tensor, Tensor | QuantizedRows]:
    """x [T, size] plus change, if there is one, and the sum normed for `entry`: rounded in the same pass
    where its product wants that.
    """
    backend, weight = kernels.norm, cast("Tensor", norm.weight)
    kind: Any = "none" if entry is None else getattr(entry.product, "quantizes", "none")
    if kind != "none" and isinstance(backend, QuantizingNorm):
        assert entry is not None, "it has a product"
        return backend.quantized(x, change, weight, norm.eps, kind, entry.product.factors)
    return (x, normed(norm, x, kernels)) if change is None else backend.added(x, change, weight, norm.eps)


def attend(attention: Attention, x: Tensor | QuantizedRows, cache: LayerCache, step: StepContext) -> Tensor:
    """x [T, E] -> [T, E]; writes this step's keys and values."""
    kernels, options = step.kernels, attention.options
    norms = attention.q_norm, attention.k_norm
    q, k, v = torch.split(multiply(attention.qkv, x), list(attention.sizes), dim=-1)
    if attention.qk_norm == "full":
        q, k = (normed(cast("Norm", norm), part, kernels) for norm, part in zip(norms, (q, k), strict=True))
    q = q.reshape(q.shape[0], attention.num_heads, -1)
    k, v = (part.reshape(part.shape[0], attention.num_kv_heads, -1) for part in (k, v))
    if attention.qk_norm == "head":
        q, k = (normed(cast("Norm", norm), part, kernels) for norm, part in zip(norms, (q, k), strict=True))
    cos, sin = step.rotations[attention.rope]
    q = kernels.rope(q, k, v, cos, sin, step.slots, cache, interleaved=attention.interleaved)
    mixed = step.attention.run(step.attention_plan, q, cache, options, cast("Tensor | None", attention.sinks))
    return multiply(attention.output, mixed.flatten(1))


def feed(feed_forward: FeedForward, x: Tensor | QuantizedRows, kernels: Kernels) -> Tensor:
    """x [T, E] -> [T, E]."""
    return multiply(
        feed_forward.down, kernels.gate(feed_forward.activation, multiply(feed_forward.gate_up, x))
    )
