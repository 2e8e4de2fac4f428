"""What every family's layers are made of: how their records are read, and how torch computes from them.

Who reads asks for tensors by name, and knows their shapes.

Shape letters: T tokens, E hidden size, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from engine.model.records import Attention, FeedForward, Linear, Norm
from engine.model.spec import ModelSpec
from engine.model.weights import WeightReader
from kernels.adapters.backends import AdapterStep
from kernels.attention.backends import AttentionBackend
from kernels.attention.ragged import AttentionOptions
from kernels.linear.backends import QuantizingProduct
from kernels.norm.backends import QuantizingNorm
from kernels.paged_cache.store import LayerCache
from kernels.rows import QuantizedRows
from kernels.selection import Kernels


@dataclass(kw_only=True)
class StepContext:
    """What all layers of one forward share."""

    kernels: Kernels
    slots: Tensor  # [T]
    # Angles of this step's tokens for each rotation of the model: cos and sin [T, R/2].
    rotations: list[tuple[Tensor, Tensor]]
    attention: AttentionBackend
    attention_plan: Any
    # Which rows have adapters; None where none has.
    adapters: AdapterStep | None = None


def read_linear(
    weights: WeightReader, names: list[str], outputs: list[int], inputs: int, bias: bool
) -> Linear:
    """One linear layer of those `names`, their outputs one after another."""
    linear = Linear(
        weight=weights.linear(names, outputs, inputs, calibrates=True),
        inputs=inputs,
        parts=tuple(zip(names, outputs, strict=True)),
    )
    if bias:
        parts = zip(names, outputs, strict=True)
        linear.bias = torch.cat([weights.take(f"{name}.bias", (size,)) for name, size in parts])
    return linear


def read_norm(weights: WeightReader, name: str, size: int, spec: ModelSpec) -> Norm:
    """The norm `name` of `size` elements."""
    weight = read_floats(weights, f"{name}.weight", size)
    return Norm(weight=weight + 1.0 if spec.norm_offset else weight, eps=spec.norm_eps)


def read_floats(weights: WeightReader, name: str, size: int) -> Tensor:
    """A tensor [size] in float32."""
    return weights.keep(name, (size,), dtype=torch.float32)


def multiply(linear: Linear, x: Tensor | QuantizedRows, adapters: AdapterStep | None = None) -> Tensor:
    """x [T, inputs], rounded already or not -> [T, outputs], with what the rows' adapters add."""
    if isinstance(x, QuantizedRows):
        assert adapters is None, "adapters take inputs as they are"
        return cast("QuantizingProduct", linear.product).of_rows(x, linear.bias)
    product: Tensor = linear.product(x, linear.bias)
    if adapters is None or linear.changes is None:
        return product
    return adapters.add(linear.changes, x, product)


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


def read_attention(weights: WeightReader, prefix: str, spec: ModelSpec, index: int) -> Attention:
    """The attention of layer `index`."""
    sizes = [spec.num_heads * spec.head_dim, *[spec.num_kv_heads * spec.head_dim] * 2]
    names, outputs = [f"{prefix}.{part}_proj" for part in "qkv"], sizes
    if spec.fused_projections:
        names, outputs = [f"{prefix}.qkv_proj"], [sum(sizes)]
    rope = spec.rope_of_layer[index]
    attention = Attention(
        qkv=read_linear(weights, names, outputs, spec.hidden_size, spec.qkv_bias),
        output=read_linear(weights, [f"{prefix}.o_proj"], [spec.hidden_size], sizes[0], spec.output_bias),
        sizes=sizes,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        options=AttentionOptions(
            scale=spec.attention_scale, window=spec.windows[index], soft_cap=spec.attention_soft_cap
        ),
        rope=rope,
        interleaved=spec.ropes[rope].interleaved,
        qk_norm=spec.qk_norm,
    )
    if spec.qk_norm != "none":
        whole = spec.qk_norm == "full"
        attention.q_norm = read_norm(weights, f"{prefix}.q_norm", sizes[0] if whole else spec.head_dim, spec)
        attention.k_norm = read_norm(weights, f"{prefix}.k_norm", sizes[1] if whole else spec.head_dim, spec)
    if spec.attention_sinks:
        attention.sinks = read_floats(weights, f"{prefix}.sinks", spec.num_heads)
    return attention


def attend(attention: Attention, x: Tensor | QuantizedRows, cache: LayerCache, step: StepContext) -> Tensor:
    """x [T, E] -> [T, E]; writes this step's keys and values."""
    kernels, options = step.kernels, attention.options
    norms = attention.q_norm, attention.k_norm
    q, k, v = torch.split(multiply(attention.qkv, x, step.adapters), list(attention.sizes), dim=-1)
    if attention.qk_norm == "full":
        q, k = (normed(cast("Norm", norm), part, kernels) for norm, part in zip(norms, (q, k), strict=True))
    q = q.reshape(q.shape[0], attention.num_heads, -1)
    k, v = (part.reshape(part.shape[0], attention.num_kv_heads, -1) for part in (k, v))
    if attention.qk_norm == "head":
        q, k = (normed(cast("Norm", norm), part, kernels) for norm, part in zip(norms, (q, k), strict=True))
    cos, sin = step.rotations[attention.rope]
    q = kernels.rope(q, k, v, cos, sin, step.slots, cache, interleaved=attention.interleaved)
    mixed = step.attention.run(step.attention_plan, q, cache, options, cast("Tensor | None", attention.sinks))
    return multiply(attention.output, mixed.flatten(1), step.adapters)


def read_feed_forward(weights: WeightReader, prefix: str, spec: ModelSpec, size: int) -> FeedForward:
    """A feed-forward of `size` inner elements."""
    names, sizes = [f"{prefix}.gate_proj", f"{prefix}.up_proj"], [size, size]
    if spec.fused_projections:
        names, sizes = [f"{prefix}.gate_up_proj"], [2 * size]
    return FeedForward(
        gate_up=read_linear(weights, names, sizes, spec.hidden_size, spec.mlp_bias),
        down=read_linear(weights, [f"{prefix}.down_proj"], [spec.hidden_size], size, spec.mlp_bias),
        activation=spec.activation,
    )


def feed(
    feed_forward: FeedForward,
    x: Tensor | QuantizedRows,
    kernels: Kernels,
    adapters: AdapterStep | None = None,
) -> Tensor:
    """x [T, E] -> [T, E]."""
    gate_up = multiply(feed_forward.gate_up, x, adapters)
    return multiply(feed_forward.down, kernels.gate(feed_forward.activation, gate_up), adapters)
