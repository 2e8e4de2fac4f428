"""Packs a decoder's weights while it is loaded, and describes what was loaded without torch."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.linear.native import NativePacker, NativeProduct
from engine.kernels.linear.packed import PackedWeight
from engine.model.decoder import Decoder, DecoderLayer
from engine.model.experts import SparseFeedForward
from engine.model.latent_attention import LatentAttention
from engine.model.layers import Attention, FeedForward, Linear, Norm
from engine.model.lowered import (
    LoweredAttention,
    LoweredFeedForward,
    LoweredLatentAttention,
    LoweredLayer,
    LoweredModel,
    LoweredNorm,
    LoweredSparseFeedForward,
)


class NativePacking:
    """Packs a model's weights for the native kernels while it is loaded."""

    def __init__(self, packer: NativePacker) -> None:
        self._packer = packer
        self.keeps_float16 = packer.keeps_float16

    def pack(self, linear: Linear) -> None:
        """Packs weight and bias of a layer; those that were read are let go."""
        assert linear.weight is not None, "packed once"
        packed = self._packer.pack(linear.weight, linear.bias)
        linear.use_packed(NativeProduct(packed, num_threads=self._packer.num_threads))


def lower(model: Decoder) -> LoweredModel:
    """The same model; its arrays are the memory of the decoder's tensors. All weights are packed."""
    table = model.embedding.contiguous()
    return LoweredModel(
        spec=model.spec,
        max_model_len=model.max_model_len,
        embedding=_bits(table),
        embedding_type=str(table.dtype).removeprefix("torch."),
        # As the torch back end rounds it.
        embedding_scale=float(torch.tensor(model.spec.embedding_scale, dtype=table.dtype)),
        layers=[_layer(layer) for layer in model.layers],
        norm=_norm(model.norm),
        head=_packed(model.head),
        ropes=[(_floats(cos), _floats(sin)) for cos, sin in model.ropes],
    )


def _layer(layer: DecoderLayer) -> LoweredLayer:
    attention, feed_forward = layer.attention, layer.feed_forward
    return LoweredLayer(
        attention=_latent(attention) if isinstance(attention, LatentAttention) else _attention(attention),
        feed_forward=_sparse(feed_forward)
        if isinstance(feed_forward, SparseFeedForward)
        else _feed_forward(feed_forward),
        before=[None if norm is None else _norm(norm) for norm in layer.before],
        after=[None if norm is None else _norm(norm) for norm in layer.after],
    )


def _attention(attention: Attention) -> LoweredAttention:
    normed = attention.qk_norm != "none"
    return LoweredAttention(
        qkv=_packed(attention.qkv),
        output=_packed(attention.output),
        sizes=attention.sizes,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        options=attention.options,
        rope=attention.rope,
        interleaved=attention.interleaved,
        qk_norm=attention.qk_norm,
        q_norm=_floats(attention.q_norm.weight) if normed else None,
        k_norm=_floats(attention.k_norm.weight) if normed else None,
        sinks=None if attention.sinks is None else _floats(attention.sinks),
    )


def _latent(attention: LatentAttention) -> LoweredLatentAttention:
    down = attention.query_down
    return LoweredLatentAttention(
        query_down=None if down is None else _packed(down),
        query_norm=None if down is None else _floats(attention.query_norm),
        query_up=_packed(attention.query_up),
        down=_packed(attention.down),
        latent_norm=_floats(attention.latent_norm),
        key_up=_floats(attention.key_up),
        value_up=_floats(attention.value_up),
        output=_packed(attention.output),
        num_heads=attention.num_heads,
        latent=attention.latent,
        options=attention.options,
        rope=attention.rope,
        interleaved=attention.interleaved,
    )


def _feed_forward(feed_forward: FeedForward) -> LoweredFeedForward:
    return LoweredFeedForward(
        gate_up=_packed(feed_forward.gate_up),
        down=_packed(feed_forward.down),
        activation=feed_forward.activation,
    )


def _sparse(feed_forward: SparseFeedForward) -> LoweredSparseFeedForward:
    router, shared = feed_forward.router, feed_forward.shared
    return LoweredSparseFeedForward(
        spec=router.experts,
        router=_packed(router.product),
        correction=None if router.correction is None else _floats(router.correction),
        gate_up=[_packed(expert.gate_up) for expert in feed_forward.experts],
        down=[_packed(expert.down) for expert in feed_forward.experts],
        activation=feed_forward.activation,
        shared=None if shared is None else _feed_forward(shared),
    )


def _norm(norm: Norm) -> LoweredNorm:
    return LoweredNorm(weight=_floats(norm.weight), eps=norm.eps)


def _floats(tensor: Tensor) -> NDArray[Any]:
    return tensor.float().contiguous().numpy()


def _bits(tensor: Tensor) -> NDArray[Any]:
    # numpy has no bfloat16.
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _packed(linear: Linear) -> PackedWeight:
    product = linear.product
    assert isinstance(product, NativeProduct), "packed before it is lowered"
    return product.weight
