"""Layers that every family is made of. Each takes its tensors from the checkpoint by name and knows their
shapes.

Shape letters: T tokens, E hidden size, H query heads, K kv heads, D head dim, I intermediate size, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from engine.kernels.attention import AttentionBackend, AttentionOptions
from engine.kernels.linear import LinearBackend, Product, QuantizedRows, QuantizingProduct, WeightFormat
from engine.kernels.norm import QuantizingNorm
from engine.kernels.paged_cache import LayerCache
from engine.model.spec import ModelSpec
from engine.model.weights import WeightReader


@dataclass(kw_only=True)
class StepContext:
    """What all layers of one forward share."""

    slots: Tensor  # [T]
    # Angles of this step's tokens for each rotation of the model: cos and sin [T, R/2].
    rotations: list[tuple[Tensor, Tensor]]
    attention: AttentionBackend
    attention_plan: Any


class Linear:
    """x W^T + b. Several tensors of the checkpoint may be stacked into one product."""

    def __init__(
        self, weights: WeightReader, names: Sequence[str], outputs: Sequence[int], inputs: int, bias: bool
    ) -> None:
        self._backend = weights.kernels.linear
        self.use(weights.linear(names, outputs, inputs, calibrates=True))  # [sum of outputs, inputs]
        self.bias: Tensor | None = None
        if bias:
            biases = [
                weights.take(f"{name}.bias", (size,)) for name, size in zip(names, outputs, strict=True)
            ]
            self.bias = torch.cat(biases)

    @classmethod
    def of(cls, weight: WeightFormat, backend: LinearBackend, bias: Tensor | None = None) -> Linear:
        """A layer from a weight and a bias that were read already."""
        linear = cls.__new__(cls)
        linear._backend = backend
        linear.use(weight)
        linear.bias = bias
        return linear

    def use(self, weight: WeightFormat) -> None:
        """Computes with `weight` from now on."""
        self.weight: WeightFormat | None = weight
        self._product: Product | None = None

    def use_packed(self, product: Product) -> None:
        """Computes with a product that holds the bias, too; the weight itself is let go."""
        self._product, self.weight, self.bias = product, None, None

    @property
    def product(self) -> Product:
        """The packed weight; the back end's, unless another was set, is made when it is first asked for."""
        if self._product is None:
            assert self.weight is not None, "a weight or a product"
            self._product = self._backend.pack(self.weight)
        return self._product

    @product.setter
    def product(self, product: Product) -> None:
        self._product = product

    def __call__(self, x: Tensor | QuantizedRows) -> Tensor:
        """x [T, inputs], rounded already or not -> [T, sum of outputs]."""
        product = self.product
        if isinstance(x, QuantizedRows):
            return cast("QuantizingProduct", product).of_rows(x, self.bias)
        return product(x, self.bias)


class Norm:
    """Root-mean-square norm with a learned weight, kept in float32."""

    def __init__(self, weights: WeightReader, name: str, size: int, spec: ModelSpec) -> None:
        self._backend = weights.kernels.norm
        self._rounds = isinstance(self._backend, QuantizingNorm)
        weight = weights.keep(f"{name}.weight", (size,), dtype=torch.float32)
        self.weight = weight + 1.0 if spec.norm_offset else weight
        self.eps = spec.norm_eps

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape."""
        return self._backend.plain(x, self.weight, self.eps)

    def added(self, x: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
        """x and change [T, size] -> their sum, and the sum normed."""
        return self._backend.added(x, change, self.weight, self.eps)

    def entering(
        self, x: Tensor, change: Tensor | None, entry: Linear | None
    ) -> tuple[Tensor, Tensor | QuantizedRows]:
        """x [T, size] plus change, if there is one, and the sum normed for `entry`: rounded in the same pass
        where its product wants that.
        """
        if entry is not None and self._rounds and getattr(entry.product, "quantizes", "none") != "none":
            backend, product = cast("QuantizingNorm", self._backend), cast("QuantizingProduct", entry.product)
            return backend.quantized(x, change, self.weight, self.eps, product.quantizes, product.factors)
        return (x, self(x)) if change is None else self.added(x, change)


class Attention:
    """Grouped-query attention with rotary positions over the paged cache."""

    def __init__(self, weights: WeightReader, prefix: str, spec: ModelSpec, layer: int) -> None:
        self._backend = weights.kernels.rope
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        sizes = [spec.num_heads * spec.head_dim, *[spec.num_kv_heads * spec.head_dim] * 2]
        self.sizes = sizes
        if spec.fused_projections:
            self.qkv = Linear(weights, [f"{prefix}.qkv_proj"], [sum(sizes)], spec.hidden_size, spec.qkv_bias)
        else:
            names = [f"{prefix}.{part}_proj" for part in "qkv"]
            self.qkv = Linear(weights, names, sizes, spec.hidden_size, spec.qkv_bias)
        self.output = Linear(weights, [f"{prefix}.o_proj"], [spec.hidden_size], sizes[0], spec.output_bias)
        self.options = AttentionOptions(
            scale=spec.attention_scale, window=spec.windows[layer], soft_cap=spec.attention_soft_cap
        )
        self.rope = spec.rope_of_layer[layer]
        self.interleaved = spec.ropes[self.rope].interleaved
        self.qk_norm = spec.qk_norm
        if spec.qk_norm != "none":
            whole = spec.qk_norm == "full"
            self.q_norm = Norm(weights, f"{prefix}.q_norm", sizes[0] if whole else spec.head_dim, spec)
            self.k_norm = Norm(weights, f"{prefix}.k_norm", sizes[1] if whole else spec.head_dim, spec)
        self.sinks: Tensor | None = None
        if spec.attention_sinks:
            self.sinks = weights.keep(f"{prefix}.sinks", (spec.num_heads,), dtype=torch.float32)

    @property
    def entry(self) -> Linear:
        """The only one that the layer's input goes to."""
        return self.qkv

    def __call__(self, x: Tensor | QuantizedRows, cache: LayerCache, step: StepContext) -> Tensor:
        """x [T, E] -> [T, E]; writes this step's keys and values."""
        q, k, v = torch.split(self.qkv(x), self.sizes, dim=-1)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.reshape(-1, self.num_heads, self.head_dim)
        k = k.reshape(-1, self.num_kv_heads, self.head_dim)
        v = v.reshape(-1, self.num_kv_heads, self.head_dim)
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = step.rotations[self.rope]
        q = self._backend.rotate_and_store(q, k, v, cos, sin, step.slots, cache, interleaved=self.interleaved)
        mixed = step.attention.run(step.attention_plan, q, cache, self.options, self.sinks)
        return self.output(mixed.flatten(1))


class FeedForward:
    """act(gate) * up, then down."""

    def __init__(self, weights: WeightReader, prefix: str, spec: ModelSpec, size: int | None = None) -> None:
        self._gate = weights.kernels.gate
        size = size or spec.intermediate_size
        if spec.fused_projections:
            names, sizes = [f"{prefix}.gate_up_proj"], [2 * size]
        else:
            names, sizes = [f"{prefix}.gate_proj", f"{prefix}.up_proj"], [size, size]
        self.gate_up = Linear(weights, names, sizes, spec.hidden_size, spec.mlp_bias)
        self.down = Linear(weights, [f"{prefix}.down_proj"], [spec.hidden_size], size, spec.mlp_bias)
        self.activation = spec.activation

    @property
    def entry(self) -> Linear:
        """The only one that the layer's input goes to."""
        return self.gate_up

    def __call__(self, x: Tensor | QuantizedRows) -> Tensor:
        """x [T, E] -> [T, E]."""
        return self.down(self._gate(self.activation, self.gate_up(x)))
