"""Blocks of attention and feed-forward that several layers share (Zamba2, arXiv 2411.15242). A use takes the
stream and the embedding side by side, adds low-rank products of its own to the block's, and what it gives is
added to what the layer's Mamba 2 takes in, and not to the stream. Torch alone computes it.

Shape letters: T tokens, E hidden size, H heads, K kv heads, D head dim, F inner elements, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from engine.model.layers import StepContext, attend, feed, multiply, normed, read_norm
from engine.model.records import Attention, FeedForward, Linear, Norm, Recurrence, SharedUse
from engine.model.spec import ModelSpec
from engine.model.state_layers import read_state, recur
from engine.model.weights import WeightReader
from kernels.attention.ragged import AttentionOptions
from runtime.errors import ConfigError


@dataclass
class _SharedBlock:
    """What all uses of a block have in common; its linear layers take no adapters."""

    before: Norm
    qkv: Linear
    attended: Linear
    between: Norm
    gate_up: Linear
    down: Linear


@dataclass
class _WithLowRank:
    """Multiplies as a linear layer of the block does, and adds two products for each run of its outputs."""

    shared: Linear
    lower: list[tuple[Linear, Linear]]

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        added = [multiply(up, multiply(down, x)) for down, up in self.lower]
        return multiply(self.shared, x) + torch.cat(added, dim=-1)


def read_shared_use(weights: WeightReader, prefix: str, spec: ModelSpec, index: int) -> SharedUse:
    """The mixer of layer `index`, which uses a block; names of its tensors begin with `prefix`. Raises
    ConfigError where weights are quantized by what they take in, which differs from use to use.
    """
    given = spec.shared_block
    assert given is not None, "called for such layers only"
    if weights.calibrates:
        raise ConfigError(
            f"engine.quantize = 'w8a8': layers of {spec.architecture} share blocks, whose inputs differ; set "
            "it to int8, or engine.quantization.smoothing to off"
        )
    use = given.layers.index(index)
    number = use % given.num_blocks
    name, own = f"model.shared_blocks.{number}", []
    block = weights.shared_blocks.get(number)
    if block is None:
        block = weights.shared_blocks[number] = _read_block(weights, name, spec)
        own = [block.qkv, block.attended, block.gate_up, block.down]
    hidden, heads = spec.hidden_size, spec.heads_of(index)
    sizes = [count * heads.head_dim for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)]
    adapters: dict[str, list[tuple[Linear, Linear]]] = {"attention": [], "gate_up": []}
    if given.adapts_attention:
        for part, size in zip("qkv", sizes, strict=True):
            found = f"{name}.self_attn.linear_{part}_adapter_list.{use}"
            adapters["attention"].append(_read_low_rank(weights, found, 2 * hidden, given.rank, size))
    found = f"{name}.feed_forward.gate_up_proj_adapter_list.{use}"
    adapters["gate_up"].append(_read_low_rank(weights, found, hidden, given.rank, 2 * spec.intermediate_size))
    output = _read_linear(weights, [f"{prefix}.shared_output"], [hidden], hidden)
    own += [output, *(linear for pairs in adapters.values() for pair in pairs for linear in pair)]
    rope = spec.rope_of_layer[index]
    return SharedUse(
        before=block.before,
        attention=Attention(
            qkv=_adapted(block.qkv, adapters["attention"]),
            output=block.attended,
            sizes=sizes,
            mixed_size=sizes[0],
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            options=AttentionOptions(scale=spec.attention_scale),
            rope=rope,
            interleaved=spec.ropes[rope].interleaved,
        ),
        between=block.between,
        feed_forward=FeedForward(
            gate_up=_adapted(block.gate_up, adapters["gate_up"]),
            down=block.down,
            activation=spec.activation,
        ),
        output=output,
        norm=read_norm(weights, f"{prefix}.input_layernorm", hidden, spec),
        recurrence=cast("Recurrence", read_state(weights, f"{prefix}.state", spec, index)),
        own=own,
    )


def use_shared(use: SharedUse, x: Tensor, cache: Any, step: StepContext) -> Tensor:
    """The stream x [T, E] -> what is added to it [T, E]; writes keys and values, and moves states on."""
    assert step.embedded is not None, "the model has blocks that read it"
    both = normed(use.before, torch.cat((x, step.embedded), dim=-1), step.kernels)
    # Adapters are of what is a layer's own.
    alone = replace(step, adapters=None)
    attended = normed(use.between, attend(use.attention, both, cache.keys, alone), step.kernels)
    entering = x + multiply(use.output, feed(use.feed_forward, attended, step.kernels))
    return recur(use.recurrence, normed(use.norm, entering, step.kernels), cache.state, step)


def _adapted(shared: Linear, lower: list[tuple[Linear, Linear]]) -> Linear:
    return Linear(weight=None, product=_WithLowRank(shared, lower)) if lower else shared


def _read_block(weights: WeightReader, name: str, spec: ModelSpec) -> _SharedBlock:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    fed = f"{name}.feed_forward"
    return _SharedBlock(
        before=read_norm(weights, f"{name}.input_layernorm", 2 * hidden, spec),
        qkv=_read_linear(
            weights,
            [f"{name}.self_attn.{part}_proj" for part in "qkv"],
            [queries, keys, keys],
            2 * hidden,
        ),
        attended=_read_linear(weights, [f"{name}.self_attn.o_proj"], [hidden], queries),
        between=read_norm(weights, f"{name}.pre_ff_layernorm", hidden, spec),
        gate_up=_read_linear(weights, [f"{fed}.gate_up_proj"], [2 * inner], hidden, bias=spec.mlp_bias),
        down=_read_linear(weights, [f"{fed}.down_proj"], [hidden], inner, bias=spec.mlp_bias),
    )


def _read_low_rank(
    weights: WeightReader, name: str, inputs: int, rank: int, outputs: int
) -> tuple[Linear, Linear]:
    return (
        _read_linear(weights, [f"{name}.0"], [rank], inputs),
        _read_linear(weights, [f"{name}.1"], [outputs], rank),
    )


def _read_linear(
    weights: WeightReader, names: list[str], outputs: list[int], inputs: int, *, bias: bool = False
) -> Linear:
    """One that takes no adapters."""
    linear = Linear(weight=weights.linear(names, outputs, inputs))
    if bias:
        linear.bias = weights.take(f"{names[0]}.bias", (outputs[0],))
    return linear
