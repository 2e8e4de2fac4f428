"""A dense feed-forward and experts side by side (Gemma 4): both look at the stream, each by a norm of its
own, and what they give is normed one by one before it is added.

Shape letters: T tokens, E hidden size.
"""

from __future__ import annotations

from torch import Tensor

from engine.model.expert_reading import read_experts
from engine.model.experts import feed_sparse
from engine.model.layers import StepContext, feed, normed, read_feed_forward, read_floats, read_norm
from engine.model.records import JoinedFeedForward, Norm
from engine.model.spec import ModelSpec
from engine.model.weights import WeightReader
from kernels.rows import QuantizedRows


def read_joined(weights: WeightReader, prefix: str, spec: ModelSpec, index: int) -> JoinedFeedForward:
    """The feed-forward of layer `index`, whose name `prefix` is."""
    experts, hidden = spec.experts, spec.hidden_size
    assert experts is not None, "called for layers with experts"

    def norm(name: str) -> Norm:
        return read_norm(weights, f"{prefix}.{name}", hidden, spec)

    count = experts.num_experts
    sparse = read_experts(weights, f"{prefix}.router.proj", f"{prefix}.experts", spec)
    sparse.expert_scales = read_floats(weights, f"{prefix}.router.per_expert_scale", count)
    # What the router takes is normed, and multiplied by this.
    scale = read_floats(weights, f"{prefix}.router.scale", hidden) * hidden**-0.5
    return JoinedFeedForward(
        dense=read_feed_forward(weights, f"{prefix}.mlp", spec, spec.intermediate_size_of(index)),
        sparse=sparse,
        router_norm=Norm(weight=scale, eps=spec.norm_eps),
        sparse_norm=norm("pre_feedforward_layernorm_2"),
        dense_after=norm("post_feedforward_layernorm_1"),
        sparse_after=norm("post_feedforward_layernorm_2"),
    )


def feed_joined(
    joined: JoinedFeedForward, inner: Tensor | QuantizedRows, stream: Tensor, step: StepContext
) -> Tensor:
    """What the dense feed-forward takes, and the stream [T, E] -> [T, E]."""
    kernels = step.kernels
    dense = feed(joined.dense, inner, kernels, step.adapters)
    asked = normed(joined.router_norm, stream, kernels)
    sparse = feed_sparse(joined.sparse, normed(joined.sparse_norm, stream, kernels), kernels, asked=asked)
    return normed(joined.dense_after, dense, kernels) + normed(joined.sparse_after, sparse, kernels)
