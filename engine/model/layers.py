"""What every family's layers are made of: how their records are read, and how torch computes from them.

Who reads asks for tensors by name, and knows their shapes.

Shape letters: T tokens, E hidden size, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import softplus

from engine.model.records import Attention, FeedForward, Linear, Norm
from engine.model.spec import ModelSpec
from engine.model.weights import WeightReader
from kernels.adapters.backends import AdapterStep
from kernels.altup.reference import cut_off
from kernels.attention.backends import AttentionBackend
from kernels.attention.indexed import IndexQueries
from kernels.attention.ragged import AttentionOptions
from kernels.linear.backends import QuantizingProduct
from kernels.norm.backends import QuantizingNorm, RowNorm
from kernels.paged_cache.channel_cache import ChannelCache
from kernels.paged_cache.store import LayerCache
from kernels.rope.reference import rotate
from kernels.rows import QuantizedRows
from kernels.selection import Kernels


@dataclass(kw_only=True)
class StepContext:
    """What all layers of one forward share."""

    kernels: Kernels
    slots: Tensor  # [T]
    # Angles of this step's tokens for each rotation of the model: cos and sin [T, R/2].
    rotations: list[tuple[Tensor, Tensor]]
    # What it multiplies their queries by: [T], or None.
    query_scales: list[Tensor | None]
    attention: AttentionBackend
    attention_plan: Any
    # Slots [T] and plan of layers with a window, where these keep blocks of their own.
    windows: tuple[Tensor, Any] | None = None
    # Plans of the step cut at blocks, and of that in window blocks, where layers have keys by channel.
    cut_plans: tuple[Any, Any] = (None, None)
    # Which rows have adapters; None where none has.
    adapters: AdapterStep | None = None
    # What layers read of the second embedding [T, layers, width], where there is one.
    per_layer: Tensor | None = None
    # Where the sequences' states lie, as the back end wants it; None where the model has none.
    states: Any = None
    # What the last indexer asked, and chose by it.
    asked: IndexQueries | None = None
    # The embedding of this step's tokens [T, E], where layers read it.
    embedded: Tensor | None = None
    # Type of the stream.
    dtype: torch.dtype = torch.float32

    @property
    def read(self) -> Callable[[Tensor | QuantizedRows], None] | None:
        """Who sees what attention computes upon, where somebody does: it is not rounded on the way then."""
        found: Callable[[Tensor | QuantizedRows], None] | None = getattr(self.attention, "read", None)
        return found

    def slots_in(self, cache: LayerCache) -> Tensor:
        """Where a layer's keys and values go [T]."""
        return self.windows[0] if self.windows is not None and cache.in_windows else self.slots

    def plan_of(self, cache: LayerCache) -> Any:
        """The plan of a layer's attention."""
        windows = self.windows if cache.in_windows else None
        if isinstance(cache, ChannelCache):
            return self.cut_plans[windows is not None]
        return self.attention_plan if windows is None else windows[1]


def read_linear(
    weights: WeightReader,
    names: list[str],
    outputs: list[int],
    inputs: int,
    bias: bool,
    order: Tensor | None = None,
) -> Linear:
    """One linear layer of those `names`, their outputs one after another; or in another `order`, in which it
    takes no adapters.
    """
    stored = [weights.stored_name(name) for name in names]
    linear = Linear(
        weight=weights.linear(names, outputs, inputs, calibrates=True, order=order),
        inputs=inputs,
        parts=tuple(zip(stored, outputs, strict=True)) if order is None else (),
        cuts=tuple(map(weights.cut_of, names)) if order is None else (),
    )
    if bias:
        parts = zip(names, outputs, strict=True)
        linear.bias = torch.cat([weights.take(f"{name}.bias", (size,)) for name, size in parts])
        linear.bias = linear.bias if order is None else linear.bias[order]
    return linear


def read_norm(weights: WeightReader, name: str, size: int, spec: ModelSpec) -> Norm:
    """The norm `name` of `size` elements between half layers, or at the end."""
    if not spec.norm_weights:
        return Norm(
            weight=torch.ones(size, device=weights.device), eps=spec.norm_eps, centered=spec.norm == "layer"
        )
    weight = read_floats(weights, f"{name}.weight", size)
    return Norm(
        weight=weight + 1.0 if spec.norm_offset else weight,
        eps=spec.norm_eps,
        bias=read_floats(weights, f"{name}.bias", size) if spec.norm_bias else None,
        centered=spec.norm == "layer",
    )


def embedding_scale(spec: ModelSpec, dtype: torch.dtype) -> float:
    """What embeddings of that type are multiplied by."""
    scale = spec.embedding_scale
    return rounded_factor(scale, dtype) if spec.rounds_embedding_scale else scale


def rounded_factor(factor: float, dtype: torch.dtype) -> float:
    """A factor as a tensor of that type holds it."""
    return float(torch.tensor(factor, dtype=dtype))


def read_floats(weights: WeightReader, name: str, *shape: int) -> Tensor:
    """A tensor of this shape in float32."""
    return weights.keep(name, shape, dtype=torch.float32)


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
    return kernels.norm.plain(x, row_norm(norm))


def row_norm(norm: Norm) -> RowNorm:
    """A norm of tensors as the kernels take it."""
    weight, bias = cast("Tensor", norm.weight), cast("Tensor | None", norm.bias)
    return RowNorm(weight, norm.eps, bias, norm.centered)


def entering(
    norm: Norm, x: Tensor, change: Tensor | None, entry: Linear | None, kernels: Kernels
) -> tuple[Tensor, Tensor | QuantizedRows]:
    """x [T, size] plus change, if there is one, and the sum normed for `entry`: rounded in the same pass
    where its product wants that.
    """
    backend = kernels.norm
    kind: Any = "none" if entry is None else getattr(entry.product, "quantizes", "none")
    if kind != "none" and isinstance(backend, QuantizingNorm):
        assert entry is not None, "it has a product"
        return backend.quantized(x, change, row_norm(norm), kind, entry.product.factors)
    if change is None:
        return x, normed(norm, x, kernels)
    return backend.added(x, change, row_norm(norm))


def read_attention(weights: WeightReader, prefix: str, spec: ModelSpec, index: int) -> Attention:
    """The attention of layer `index`."""
    heads = spec.heads_of(index)
    queries, keys = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    values, mixed = heads.num_kv_heads * heads.value_dim, heads.num_heads * heads.value_dim
    sizes = (
        [queries, keys, 0 if heads.values_of_keys else values] if heads.cache_of is None else [queries, 0, 0]
    )
    parts = [(f"{prefix}.{part}_proj", size) for part, size in zip("qkv", sizes, strict=True) if size]
    if heads.cache_of is not None:
        # Checkpoints may hold what training left of them.
        for name in ("k_proj", "v_proj", "k_norm", "v_norm"):
            weights.discard(f"{prefix}.{name}.weight")
    names, outputs = [name for name, _ in parts], [size for _, size in parts]
    if spec.fused_qkv != "none":
        names, outputs = [f"{prefix}.qkv_proj"], [sum(sizes)]
    order = _from_heads(spec).to(weights.device) if spec.fused_qkv == "by_head" else None
    if spec.attention_gate == "by_head":
        outputs = [2 * sizes[0], *sizes[1:]]
        order = _gates_last(spec).to(weights.device)
    num_gates = {"none": 0, "one_per_head": heads.num_heads}.get(spec.attention_gate, mixed)
    if num_gates and spec.attention_gate != "by_head":
        names, outputs = [*names, f"{prefix}.gate_proj"], [*outputs, num_gates]
    rope = spec.rope_of_layer[index]
    attention = Attention(
        qkv=read_linear(weights, names, outputs, spec.hidden_size, spec.qkv_bias, order),
        output=read_linear(weights, [f"{prefix}.o_proj"], [spec.hidden_size], mixed, spec.output_bias),
        sizes=sizes,
        mixed_size=mixed,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        options=AttentionOptions(
            scale=spec.attention_scale,
            window=spec.windows[index],
            soft_cap=spec.attention_soft_cap,
            chunk=spec.chunks[index] if spec.chunks else None,
            ahead=spec.ahead(index),
        ),
        rope=rope,
        interleaved=spec.ropes[rope].interleaved,
        qk_norm="none",
        norm_last=spec.qk_norm_last,
        value_scale=spec.value_scale,
        num_gates=num_gates,
        gate_kind=spec.attention_gate_kind,
    )
    if spec.qk_norm != "none" and (spec.qk_norm != "unit" or spec.ropes[rope].rotary_dim):
        attention.qk_norm = "full" if spec.qk_norm == "full" else "head"
        read = partial(_head_norm, weights, spec=spec, size=heads.head_dim)
        attention.q_norm = read(f"{prefix}.q_norm", heads.num_heads)
        attention.k_norm = read(f"{prefix}.k_norm", heads.num_kv_heads) if attention.stores else None
    if spec.value_norm and attention.stores:
        attention.v_norm = unit_norm(heads.head_dim, spec.norm_eps, weights.device)
    if spec.attention_sinks and (spec.windows[index] or not spec.sinks_in_windows):
        attention.sinks = read_floats(weights, f"{prefix}.sinks", heads.num_heads)
    return attention


def _from_heads(spec: ModelSpec) -> Tensor:
    """Rows of q, k and v, which are stored by heads of keys: its queries, k, v of the first, and so on."""
    group = spec.num_heads // spec.num_kv_heads
    rows = torch.arange((spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
    rows = rows.view(spec.num_kv_heads, group + 2, spec.head_dim)
    return torch.cat((rows[:, :group].flatten(), rows[:, group].flatten(), rows[:, group + 1].flatten()))


def unit_norm(size: int, eps: float, device: torch.device) -> Norm:
    """A norm that has no weights."""
    return Norm(weight=torch.ones(size, device=device), eps=eps)


def _gates_last(spec: ModelSpec) -> Tensor:
    """Rows of q, k and v, of which q has each head's gate behind its query: q, k, v, gates."""
    size, others = spec.num_heads * spec.head_dim, 2 * spec.num_kv_heads * spec.head_dim
    queries, gates = torch.arange(2 * size).view(spec.num_heads, 2, spec.head_dim).unbind(1)
    return torch.cat((queries.flatten(), torch.arange(2 * size, 2 * size + others), gates.flatten()))


def _head_norm(weights: WeightReader, name: str, num_heads: int, *, spec: ModelSpec, size: int) -> Norm:
    """The norm of queries or keys."""
    if spec.qk_norm == "unit":
        weight = torch.ones(size, device=weights.device)
    elif spec.qk_norm == "each" and weights.has(f"{name}.norms.0.weight"):
        each = [read_floats(weights, f"{name}.norms.{head}.weight", size) for head in range(num_heads)]
        weight = torch.stack(each)
    elif spec.qk_norm == "each":
        weight = read_floats(weights, f"{name}.weight", num_heads, size)
    else:
        weight = read_floats(weights, f"{name}.weight", num_heads * size if spec.qk_norm == "full" else size)
    weight = weight + 1.0 if spec.norm_offset else weight
    return Norm(weight=weight, eps=spec.norm_eps, centered=spec.norm == "layer")


def attend(attention: Attention, x: Tensor | QuantizedRows, cache: LayerCache, step: StepContext) -> Tensor:
    """x [T, E] -> [T, E]; writes this step's keys and values."""
    kernels, options = step.kernels, attention.options
    norms = attention.q_norm, attention.k_norm
    sizes = [*attention.sizes, *([attention.num_gates] if attention.num_gates else [])]
    if step.read is not None:
        step.read(x)
    q, k, v, *gates = torch.split(multiply(attention.qkv, x, step.adapters), sizes, dim=-1)
    if attention.qk_norm == "full":
        q, k = (normed(cast("Norm", norm), part, kernels) for norm, part in zip(norms, (q, k), strict=True))
    q = q.reshape(q.shape[0], attention.num_heads, -1)
    cos, sin = step.rotations[attention.rope]
    if attention.stores:
        q = _turn_and_store(attention, q, k, v, cache, step)
    else:
        q = q if attention.q_norm is None else normed(attention.q_norm, q, kernels)
        q = rotate(q, cos, sin, interleaved=attention.interleaved)
    scales = step.query_scales[attention.rope]
    if scales is not None:
        q = q * scales[:, None, None].to(q.dtype)
    sinks = cast("Tensor | None", attention.sinks)
    mixed = step.attention.run(step.plan_of(cache), q, cache, options, sinks).flatten(1)
    for gate in gates:
        apply, each = step.kernels.recurrent.gated_norm, gate
        if attention.num_gates < attention.mixed_size:
            each = gate.repeat_interleave(attention.mixed_size // attention.num_gates, dim=1)
        gated = apply(mixed, each, None, 0.0, size=mixed.shape[1], gate_first=False, kind=attention.gate_kind)
        mixed = gated.to(step.dtype)
    return multiply(attention.output, mixed, step.adapters)


def _turn_and_store(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, step: StepContext
) -> Tensor:
    """Queries q [T, H, D], normed and turned; keys and values [T, K * D] of the step go to the cache."""
    kernels, norms = step.kernels, (attention.q_norm, attention.k_norm)
    cos, sin = step.rotations[attention.rope]
    k = k.reshape(k.shape[0], attention.num_kv_heads, -1)
    # Values may be the keys, as they are here.
    v = v.reshape(*k.shape[:2], -1) if attention.sizes[2] else k
    if attention.value_scale != 1.0:
        v = v * attention.value_scale
    if attention.norm_last:
        # What is left to the kernel then is the write to the cache: there is nothing to turn.
        q, k = (rotate(part, cos, sin, interleaved=attention.interleaved) for part in (q, k))
        cos, sin = cos[:, :0].contiguous(), sin[:, :0].contiguous()
    if attention.qk_norm == "head":
        q, k = (normed(cast("Norm", norm), part, kernels) for norm, part in zip(norms, (q, k), strict=True))
    if attention.v_norm is not None:
        v = normed(attention.v_norm, v, kernels)
    slots = step.slots_in(cache)
    return kernels.rope(q, k, v, cos, sin, slots, cache, interleaved=attention.interleaved)


def read_feed_forward(weights: WeightReader, prefix: str, spec: ModelSpec, size: int) -> FeedForward:
    """A feed-forward of `size` inner elements."""
    names, sizes = [f"{prefix}.gate_proj", f"{prefix}.up_proj"], [size, size]
    if not spec.gated:
        names, sizes = [f"{prefix}.up_proj"], [size]
    elif spec.fused_gate_up:
        names, sizes = [f"{prefix}.gate_up_proj"], [2 * size]
    order = torch.arange(2 * size, device=weights.device).roll(size) if spec.up_first else None
    down_bias = spec.mlp_bias or spec.down_bias
    feed_forward = FeedForward(
        gate_up=read_linear(weights, names, sizes, spec.hidden_size, spec.mlp_bias, order),
        down=read_linear(weights, [f"{prefix}.down_proj"], [spec.hidden_size], size, down_bias),
        activation=spec.activation,
        plain=not spec.gated,
    )
    if spec.activation == "xielu":
        feed_forward.coefficients = _xielu_coefficients(weights, f"{prefix}.act_fn")
    return feed_forward


def _xielu_coefficients(weights: WeightReader, prefix: str) -> Tensor:
    """Those of kernels/activation [4]; of the learned ones checkpoints hold what softplus makes positive."""
    above, below = (softplus(read_floats(weights, f"{prefix}.{name}", 1)) for name in ("alpha_p", "alpha_n"))
    beta, most = (
        weights.take(f"{prefix}.{name}", (), dtype=torch.float32).view(1) for name in ("beta", "eps")
    )
    return torch.cat((above, beta + below, beta, most))


def feed(
    feed_forward: FeedForward,
    x: Tensor | QuantizedRows,
    kernels: Kernels,
    adapters: AdapterStep | None = None,
) -> Tensor:
    """x [T, E] -> [T, E]."""
    gate_up = multiply(feed_forward.gate_up, x, adapters)
    if feed_forward.cut is not None:
        gates, up = gate_up.chunk(2, dim=-1)
        gate_up = torch.cat((cut_off(gates, feed_forward.cut), up), dim=-1)
    inner = kernels.gate(
        feed_forward.activation,
        gate_up,
        plain=feed_forward.plain,
        coefficients=cast("Tensor | None", feed_forward.coefficients),
    )
    return multiply(feed_forward.down, inner, adapters)
