"""Layers of Gemma 3n: alternating updates of several streams, and a product of low rank beside attention
(LAuReL, arXiv 2411.07501).

Shape letters: T tokens, E hidden size, A streams.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from engine.model.layers import (
    StepContext,
    attend,
    feed,
    multiply,
    normed,
    read_floats,
    read_linear,
    read_norm,
)
from engine.model.per_layer import add_input
from engine.model.records import AltUp, Attention, FeedForward, Layer, Linear, Norm, StreamEnds
from engine.model.spec import ModelSpec
from engine.model.weights import WeightReader
from kernels.altup.reference import as_large_as, coefficients, corrected, predicted
from kernels.linear.formats import DenseWeight
from kernels.selection import Kernels

if TYPE_CHECKING:
    from kernels.paged_cache.store import LayerCache

# The sum of two numbers of the same spread.
HALVED = 2.0**-0.5


def read_altup(weights: WeightReader, prefix: str, spec: ModelSpec) -> AltUp:
    """What the layer `prefix` has of it."""
    given, hidden = spec.altup, spec.hidden_size
    assert given is not None, "called for models that have streams"
    name, count = f"{prefix}.altup", given.num_streams
    router = weights.take(f"{name}.modality_router.weight", (count, hidden), dtype=torch.float32)
    router_norm = read_norm(weights, f"{name}.router_norm", hidden, spec)
    router_norm.weight = router_norm.weight / hidden
    scale = read_floats(weights, _scale_name(weights, name), hidden)
    rank, laurel = given.laurel_rank, f"{prefix}.laurel"
    return AltUp(
        router_norm=router_norm,
        router=Linear(weight=DenseWeight(values=router)),
        prediction=read_floats(weights, f"{name}.prediction_coefs.weight", count * count, count),
        correction=read_floats(weights, f"{name}.correction_coefs.weight", count, count),
        scale=scale if given.scales_active else None,
        active=given.active,
        left=read_linear(weights, [f"{laurel}.linear_left"], [rank], hidden, False),
        right=read_linear(weights, [f"{laurel}.linear_right"], [hidden], rank, False),
        laurel_norm=read_norm(weights, f"{laurel}.post_laurel_norm", hidden, spec),
    )


def _scale_name(weights: WeightReader, name: str) -> str:
    """GGUF's end alike."""
    found = f"{name}.correct_output_scale"
    return found if weights.has(found) else f"{found}.weight"


def read_ends(weights: WeightReader, spec: ModelSpec) -> StreamEnds:
    """The products before the first layer and behind the last."""
    assert spec.altup is not None, "called for models that have streams"
    hidden, others = spec.hidden_size, range(spec.altup.num_streams - 1)

    def read(name: str) -> list[Linear]:
        names = [f"model.{name}.{index}" for index in others]
        return [Linear(weight=weights.linear([each], [hidden], hidden)) for each in names]

    return StreamEnds(outward=read("altup_projections"), inward=read("altup_unembed_projections"))


def spread(ends: StreamEnds, x: Tensor) -> Tensor:
    """Embeddings x [T, E] -> streams [A, T, E]."""
    return torch.stack([x, *(as_large_as(multiply(each, x), x) for each in ends.outward)])


def gathered(ends: StreamEnds, streams: Tensor) -> Tensor:
    """streams [A, T, E] -> [T, E]."""
    total = first = streams[0]
    for each, stream in zip(ends.inward, streams[1:], strict=True):
        total = total + as_large_as(multiply(each, stream), first)
    return total / streams.shape[0]


def advance_streams(layer: Layer, streams: Tensor, cache: LayerCache, step: StepContext) -> Tensor:
    """The streams [A, T, E] before the layer -> the same after it."""
    altup, kernels = layer.altup, step.kernels
    attention, feed_forward = layer.attention, layer.feed_forward
    assert altup is not None, "called for layers that have streams"
    assert isinstance(attention, Attention), "as the family has it"
    assert isinstance(feed_forward, FeedForward), "as the family has it"
    assert layer.per_layer is not None, "as the family has it"
    before, after = cast("list[Norm]", layer.before), cast("list[Norm]", layer.after)
    shares = _routed(altup, streams[altup.active], kernels)
    predictions = predicted(streams, coefficients(cast("Tensor", altup.prediction), shares))
    x = predictions[altup.active]
    inner = normed(before[0], x, kernels)
    low = multiply(altup.right, multiply(altup.left, inner, step.adapters), step.adapters)
    beside = inner + normed(altup.laurel_norm, low, kernels)
    attended = x + normed(after[0], attend(attention, inner, cache, step), kernels)
    x = (attended + beside) * HALVED
    fed = feed(feed_forward, normed(before[1], x, kernels), kernels, step.adapters)
    x = x + normed(after[1], fed, kernels)
    shares = coefficients(cast("Tensor", altup.correction), _routed(altup, x, kernels))
    streams = corrected(predictions, x, shares, altup.active)
    first = streams[altup.active]
    first = first if altup.scale is None else (first * cast("Tensor", altup.scale)).to(x.dtype)
    change = normed(after[2], add_input(layer.per_layer, first, step), kernels)
    return torch.cat((streams[:1], streams[1:] + change))


def _routed(altup: AltUp, x: Tensor, kernels: Kernels) -> Tensor:
    """x [T, E] -> [T, A] in float32."""
    return torch.tanh(multiply(altup.router, normed(altup.router_norm, x, kernels).float()))
