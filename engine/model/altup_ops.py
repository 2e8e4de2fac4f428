"""Layers of Gemma 3n as native ops; `altup` says what they are, and has the same in torch.

Shape letters: T tokens, E hidden size, A streams.
"""

from __future__ import annotations

import numpy as np

from engine.model.layer_spec import SUM_SCALE
from engine.model.ops_builder import OpsBuilder
from engine.model.per_layer_ops import add_input
from engine.model.records import AltUp, Attention, FeedForward, Floats, Layer, Linear, Norm, StreamEnds
from kernels.altup.native import AltUpCorrectArgs, AltUpPredictArgs, MagnitudeArgs, StreamMeanArgs
from kernels.host import Values, address_of, empty
from kernels.norm.native import NormArgs, norm_op
from kernels.paged_cache.native import Storage


class StreamBuffers:
    """The streams [A, T, E], and what a layer predicts of them."""

    def __init__(self, builder: OpsBuilder, num_streams: int) -> None:
        shape = (num_streams, *builder.stream.shape)
        self.streams: Floats = empty(shape)
        self.predicted: Floats = empty(shape)
        self.stride = int(np.prod(shape[1:]))


def spread(builder: OpsBuilder, ends: StreamEnds) -> StreamBuffers:
    """The streams that the embeddings in the builder's stream become."""
    buffers = StreamBuffers(builder, 1 + len(ends.outward))
    first, *others = buffers.streams
    _norm(builder, builder.stream, residual=first)
    for linear, stream in zip(ends.outward, others, strict=True):
        _scaled_product(builder, linear, builder.stream, stream, builder.stream)
    return buffers


def gather(builder: OpsBuilder, ends: StreamEnds, buffers: StreamBuffers) -> None:
    """The streams' mean in the builder's stream."""
    first, *others = buffers.streams
    for linear, stream, target in zip(ends.inward, others, buffers.predicted, strict=False):
        _scaled_product(builder, linear, stream, target, first)
    args = StreamMeanArgs(
        step=builder.step,
        first=address_of(first),
        others=address_of(buffers.predicted),
        out=address_of(builder.stream),
        num_streams=len(buffers.streams),
        stream_stride=buffers.stride,
        width=builder.stream.shape[1],
    )
    builder.add("stream_mean", args, buffers)


def advance(builder: OpsBuilder, layer: Layer, cache: Storage, buffers: StreamBuffers) -> None:
    """The streams after a layer, of which the builder's stream holds the active one meanwhile."""
    altup, attention, feed_forward = layer.altup, layer.attention, layer.feed_forward
    assert altup is not None, "called for layers that have streams"
    assert isinstance(attention, Attention), "as the family has it"
    assert isinstance(feed_forward, FeedForward), "as the family has it"
    assert layer.per_layer is not None, "as the family has it"
    stream, width = builder.stream, builder.stream.shape[1]
    change = builder.buffer("change", width)
    _predict(builder, altup, buffers)
    inner = builder.enter(layer.before[0])
    beside = _beside(builder, altup, inner)
    builder.attention(attention, cache, inner, change, False)
    _norm(builder, stream, change=change, change_norm=layer.after[0], residual=stream)
    normed = builder.buffer("normed", width)
    _norm(builder, stream, change=beside, residual=stream, gain=SUM_SCALE, norm=layer.before[1], out=normed)
    builder.feed_forward(feed_forward, normed, change, False)
    _norm(builder, stream, change=change, change_norm=layer.after[1], residual=stream)
    active = _correct(builder, altup, buffers)
    assert builder.parts is not None, "read when the step began"
    # The gate reads the active stream; what comes of it joins the others.
    add_input(builder, layer.per_layer, builder.parts, active)
    for other in buffers.streams[1:]:
        _norm(builder, other, change=change, change_norm=layer.after[2], residual=other)


def _beside(builder: OpsBuilder, altup: AltUp, x: Floats) -> Floats:
    """x and its normed product of low rank, added."""
    low = builder.buffer("laurel_low", altup.left.packed.outputs)
    product, beside = (builder.buffer(name, x.shape[1]) for name in ("laurel_product", "laurel"))
    builder.product(altup.left, x, low, False)
    builder.product(altup.right, low, product, False)
    _norm(builder, x, change=product, change_norm=altup.laurel_norm, residual=beside)
    return beside


def _route(builder: OpsBuilder, altup: AltUp, x: Floats) -> Floats:
    """The router's answer to x [T, E], before its tanh: [T, A]."""
    normed = builder.buffer("asked", x.shape[1])
    _norm(builder, x, norm=altup.router_norm, out=normed)
    routed = builder.buffer("routed", altup.router.packed.outputs)
    builder.product(altup.router, normed, routed, False)
    return routed


def _predict(builder: OpsBuilder, altup: AltUp, buffers: StreamBuffers) -> None:
    routed = _route(builder, altup, buffers.streams[altup.active])
    args = AltUpPredictArgs(
        step=builder.step,
        streams=address_of(buffers.streams),
        routed=address_of(routed),
        weight=address_of(altup.prediction),
        predicted=address_of(buffers.predicted),
        active_out=address_of(builder.stream),
        num_streams=len(buffers.streams),
        stream_stride=buffers.stride,
        width=builder.stream.shape[1],
        active=altup.active,
    )
    builder.add("altup_predict", args, buffers, altup, routed)


def _correct(builder: OpsBuilder, altup: AltUp, buffers: StreamBuffers) -> Floats:
    """By the builder's stream; returns the active one, as the gate takes it."""
    active = builder.buffer("active", builder.stream.shape[1])
    routed = _route(builder, altup, builder.stream)
    args = AltUpCorrectArgs(
        step=builder.step,
        predicted=address_of(buffers.predicted),
        activated=address_of(builder.stream),
        routed=address_of(routed),
        weight=address_of(altup.correction),
        scale=None if altup.scale is None else address_of(altup.scale),
        streams=address_of(buffers.streams),
        active_out=address_of(active),
        num_streams=len(buffers.streams),
        stream_stride=buffers.stride,
        width=builder.stream.shape[1],
        active=altup.active,
    )
    builder.add("altup_correct", args, buffers, altup, routed, active)
    return active


def _scaled_product(builder: OpsBuilder, linear: Linear, x: Floats, out: Floats, like: Floats) -> None:
    builder.product(linear, x, out, False)
    args = MagnitudeArgs(
        step=builder.step, x=address_of(out), like=address_of(like), width=builder.stream.shape[1]
    )
    builder.add("match_magnitude", args, x, out, like)


def _norm(
    builder: OpsBuilder,
    x: Floats,
    *,
    change: Values | None = None,
    change_norm: Norm | None = None,
    residual: Values | None = None,
    gain: float = 0.0,
    norm: Norm | None = None,
    out: Values | None = None,
) -> None:
    """A norm as kernels/norm/norm.h has it."""
    either = norm or change_norm
    args = NormArgs(
        step=builder.step,
        x=address_of(x),
        change=None if change is None else address_of(change),
        change_weight=None if change_norm is None else address_of(change_norm.weight),
        residual=None if residual is None else address_of(residual),
        weight=None if norm is None else address_of(norm.weight),
        out=None if out is None else address_of(out),
        width=x.shape[1],
        eps=0.0 if either is None else either.eps,
        gain=gain,
    )
    builder.ops.append(norm_op(builder.library, args, x, change, residual, out, norm, change_norm))
