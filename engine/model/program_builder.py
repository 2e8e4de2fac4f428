"""The layers of a decoder as native ops, half layer by half layer.

Shape letters: T tokens, E hidden size, H query heads, I and M inputs and outputs of a head's product.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from engine.kernels.activation.native import KINDS, ActivationArgs
from engine.kernels.attention.native import AttentionArgs, AttentionPlan, AttentionPlanArgs
from engine.kernels.experts.native import ExpertBuffers, Routing, SparseLayer, sparse_ops
from engine.kernels.linear.native import NativeProduct, PackedWeight, gemm_args, make_workspace, product_ops
from engine.kernels.native import NativeLibrary, Op
from engine.kernels.native.embedding import TABLE_TYPES, EmbeddingArgs
from engine.kernels.native.library import StepStruct
from engine.kernels.norm.native import RmsNormArgs
from engine.kernels.paged_cache import LayerCache
from engine.kernels.paged_cache.native import describe
from engine.kernels.rope.native import QK_NORMS, HeadProductArgs, LatentCacheArgs, RopeCacheArgs
from engine.model.calibration import linears
from engine.model.decoder import Decoder, DecoderLayer
from engine.model.experts import SparseFeedForward
from engine.model.latent_attention import INNER_NORM_EPS, LatentAttention
from engine.model.layers import Attention, FeedForward, Linear, Norm

NUM_TOKENS = StepStruct.num_tokens.offset


class ProgramBuilder:
    """Appends ops layer by layer. `stream` [T, E] is the residual stream."""

    def __init__(
        self, model: Decoder, library: NativeLibrary, step: StepStruct, max_tokens: int, num_threads: int
    ) -> None:
        self.model, self.spec, self.library = model, model.spec, library
        self.step = ctypes.addressof(step)
        self.ops: list[Op] = []
        self.max_tokens = max_tokens
        self._buffers: dict[str, Tensor] = {}
        self.stream = self.buffer("stream", model.spec.hidden_size)
        # A half layer's output that is normed before it joins the stream, and that norm.
        self.pending: Norm | None = None
        widest = max(
            packed_weight(linear.product).inputs for layer in model.layers for linear in linears(layer)
        )
        self.workspace = make_workspace(library, max_tokens, widest, num_threads)
        self.num_threads = num_threads
        self.plan: AttentionPlan | None = None
        self.expert_buffers: ExpertBuffers | None = None

    def buffer(self, name: str, width: int) -> Tensor:
        """[max_tokens, width] float32, the same for all layers."""
        if name not in self._buffers or self._buffers[name].shape[1] != width:
            self._buffers[name] = torch.empty(self.max_tokens, width)
        return self._buffers[name]

    def add(self, name: str, args: ctypes.Structure, *keep: object) -> None:
        """Appends an op; `keep` is what its args point to."""
        self.ops.append(Op(self.library, name, args, *keep))

    def embed(self) -> None:
        """Token ids to the stream."""
        table = self.model.embedding.contiguous()
        args = EmbeddingArgs(
            self.step,
            table.data_ptr(),
            self.stream.data_ptr(),
            self.spec.hidden_size,
            TABLE_TYPES[table.dtype],
            self._embedding_scale(table.dtype),
        )
        self.add("embedding", args, table)

    def _embedding_scale(self, dtype: torch.dtype) -> float:
        """As the torch back end rounds it."""
        return float(torch.tensor(self.spec.embedding_scale, dtype=dtype))

    def layer(self, layer: DecoderLayer, cache: LayerCache) -> None:
        """Attention and feed-forward."""
        attention, feed_forward = layer.attention, layer.feed_forward

        def attend(x: Tensor, out: Tensor, join: bool) -> None:
            if isinstance(attention, LatentAttention):
                self.latent_attention(attention, cache, x, out, join)
            else:
                self.attention(attention, cache, x, out, join)

        def feed(x: Tensor, out: Tensor, join: bool) -> None:
            if isinstance(feed_forward, SparseFeedForward):
                self.sparse_feed_forward(feed_forward, x, out, join)
            else:
                self.feed_forward(feed_forward, x, out, join)

        self.half(layer.before[0], layer.after[0], attend)
        self.half(layer.before[1], layer.after[1], feed)

    def half(
        self, before: Norm | None, after: Norm | None, compute: Callable[[Tensor, Tensor, bool], None]
    ) -> None:
        """One half layer: compute(input, output, whether the output is added to what is there)."""
        x = self.enter(before)
        if after is None:
            compute(x, self.stream, True)
        else:
            compute(x, self.buffer("change", self.spec.hidden_size), False)
            self.pending = after

    def enter(self, norm: Norm | None) -> Tensor:
        """What a half layer computes upon; a pending change joins the stream on the way."""
        normed = self.buffer("normed", self.spec.hidden_size) if norm is not None else None
        if norm is None and self.pending is None:
            return self.stream
        change = self.buffer("change", self.spec.hidden_size) if self.pending else None
        args = RmsNormArgs(
            step=self.step,
            x=self.stream.data_ptr(),
            change=None if change is None else change.data_ptr(),
            change_weight=None if self.pending is None else self.pending.weight.data_ptr(),
            residual=None if change is None else self.stream.data_ptr(),
            weight=None if norm is None else norm.weight.data_ptr(),
            out=None if normed is None else normed.data_ptr(),
            width=self.spec.hidden_size,
            logit_rows=0,
            eps=self.spec.norm_eps,
        )
        self.add("rms_norm", args, change, normed, norm, self.pending)
        self.pending = None
        return self.stream if normed is None else normed

    def finish(self) -> None:
        """Lets the last change join the stream."""
        self.enter(None)

    def product(self, linear: Linear, x: Tensor, out: Tensor, join: bool) -> None:
        """out (+)= x W^T + b; x and out may be wider than the product."""
        weight = packed_weight(linear.product)
        args = gemm_args(
            weight,
            self.step + NUM_TOKENS,
            x.data_ptr(),
            out.data_ptr(),
            self.workspace.data_ptr(),
            x_stride=x.stride(0),
            out_stride=out.stride(0),
            accumulate=join,
        )
        self.ops.extend(product_ops(self.library, args, weight, x, out, self.workspace))

    def attention(self, attention: Attention, cache: LayerCache, x: Tensor, out: Tensor, join: bool) -> None:
        """Projections, rotation, cache write, attention, output."""
        qkv = self.buffer("qkv", sum(attention.sizes))
        mixed = self.buffer("mixed", attention.sizes[0])
        self.product(attention.qkv, x, qkv, False)
        self.rotate(attention, describe(cache), qkv)
        self.attend(attention, cache, attention.num_kv_heads, qkv, mixed, attention.sinks)
        self.product(attention.output, mixed, out, join)

    def attend(
        self,
        attention: Attention | LatentAttention,
        cache: LayerCache,
        num_kv_heads: int,
        q: Tensor,
        mixed: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        """mixed [T, H * value dim] from the queries at the beginning of each row of q, over the cache."""
        if self.plan is None:
            self.plan = AttentionPlan(
                self.library,
                num_heads=attention.num_heads,
                num_kv_heads=num_kv_heads,
                value_dim=mixed.shape[1] // attention.num_heads,
                block_size=cache.block_size,
            )
            self.add("attention_plan", AttentionPlanArgs(self.step, self.plan.address), self.plan)
        options = attention.options
        args = AttentionArgs(
            step=self.step,
            plan=self.plan.address,
            q=q.data_ptr(),
            out=mixed.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            cache=describe(cache),
            num_heads=attention.num_heads,
            q_stride=q.stride(0),
            out_stride=mixed.stride(0),
            window=options.window or 0,
            scale=options.scale,
            soft_cap=options.soft_cap or 0.0,
        )
        self.add("attention", args, attention, cache, q, mixed)

    def rotate(self, attention: Attention, described: ctypes.Structure, qkv: Tensor) -> None:
        """Norms of queries and keys, rotation, and the write to the cache."""
        cos, sin = (part.contiguous() for part in self.model.ropes[attention.rope])
        normed = attention.qk_norm != "none"
        args = RopeCacheArgs(
            step=self.step,
            qkv=qkv.data_ptr(),
            q_norm=attention.q_norm.weight.data_ptr() if normed else None,
            k_norm=attention.k_norm.weight.data_ptr() if normed else None,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            cache=described,
            num_heads=attention.num_heads,
            rotary_dim=2 * cos.shape[1],
            interleaved=int(attention.interleaved),
            norm=QK_NORMS[attention.qk_norm],
            eps=self.spec.norm_eps,
        )
        self.add("rope_cache", args, attention, cos, sin)

    def latent_attention(
        self, attention: LatentAttention, cache: LayerCache, x: Tensor, out: Tensor, join: bool
    ) -> None:
        """Queries and one latent per token, both absorbed projections, attention over the latents, output."""
        latent, heads = attention.latent, attention.num_heads
        query_size, key_size = latent.nope_dim + latent.rope_dim, latent.kv_rank + latent.rope_dim
        q = self.buffer("q", heads * query_size)
        down = self.buffer("down", key_size)
        queries = self.buffer("queries", heads * key_size)
        mixed = self.buffer("mixed", heads * latent.kv_rank)
        values = self.buffer("values", heads * latent.value_dim)
        self.product(attention.query_up, self._query_input(attention, x), q, False)
        self.product(attention.down, x, down, False)
        cos, sin = (part.contiguous() for part in self.model.ropes[attention.rope])
        args = LatentCacheArgs(
            step=self.step,
            down=down.data_ptr(),
            latent_norm=attention.latent_norm.data_ptr(),
            q=q.data_ptr(),
            queries=queries.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            cache=describe(cache),
            num_heads=heads,
            nope_dim=latent.nope_dim,
            rotary_dim=latent.rope_dim,
            interleaved=int(attention.interleaved),
            eps=INNER_NORM_EPS,
        )
        self.add("latent_cache", args, attention, cos, sin)
        self._head_product(q, attention.key_up, queries)
        self.attend(attention, cache, 1, queries, mixed)
        self._head_product(mixed, attention.value_up, values)
        self.product(attention.output, values, out, join)

    def _query_input(self, attention: LatentAttention, x: Tensor) -> Tensor:
        """x, or its normed projection to the rank of the queries."""
        if attention.query_down is None:
            return x
        rank = attention.latent.query_rank
        inner = self.buffer("query_latent", rank)
        self.product(attention.query_down, x, inner, False)
        args = RmsNormArgs(
            step=self.step,
            x=inner.data_ptr(),
            weight=attention.query_norm.data_ptr(),
            out=inner.data_ptr(),
            width=rank,
            eps=INNER_NORM_EPS,
        )
        self.add("rms_norm", args, attention, inner)
        return inner

    def _head_product(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """out[t, h, :M] = x[t, h, :I] weight[h]; weight [H, I, M], and rows of heads may be wider."""
        heads, inputs, outputs = weight.shape
        args = HeadProductArgs(
            step=self.step,
            x=x.data_ptr(),
            weight=weight.data_ptr(),
            out=out.data_ptr(),
            num_heads=heads,
            inputs=inputs,
            outputs=outputs,
            x_stride=x.shape[1] // heads,
            out_stride=out.shape[1] // heads,
        )
        self.add("head_product", args, x, weight, out)

    def feed_forward(self, feed_forward: FeedForward, x: Tensor, out: Tensor, join: bool) -> None:
        """Gate and up, their activation in place, down."""
        width = packed_weight(feed_forward.down.product).inputs
        gate_up = self.buffer("gate_up", 2 * width)
        self.product(feed_forward.gate_up, x, gate_up, False)
        args = ActivationArgs(
            step=self.step,
            gate_up=gate_up.data_ptr(),
            out=gate_up.data_ptr(),
            width=width,
            out_stride=gate_up.stride(0),
            kind=KINDS[feed_forward.activation],
        )
        self.add("activation", args, gate_up)
        self.product(feed_forward.down, gate_up, out, join)

    def sparse_feed_forward(
        self, feed_forward: SparseFeedForward, x: Tensor, out: Tensor, join: bool
    ) -> None:
        """The router's choice of experts, and the feed-forward that all tokens share."""
        experts = feed_forward.router.experts
        routing = Routing(
            num_experts=experts.num_experts,
            num_active=experts.num_active,
            scoring=experts.scoring,
            normalized=experts.normalized,
            scaling=experts.scaling,
            num_groups=experts.num_groups,
            num_active_groups=experts.num_active_groups,
            group_score=experts.group_score,
        )
        if self.expert_buffers is None:
            self.expert_buffers = ExpertBuffers(
                self.library,
                routing,
                max_tokens=self.max_tokens,
                hidden_size=self.spec.hidden_size,
                intermediate_size=experts.intermediate_size,
                num_threads=self.num_threads,
            )
        layer = SparseLayer(
            routing=routing,
            router=packed_weight(feed_forward.router.product.product),
            gate_up=[packed_weight(expert.gate_up.product) for expert in feed_forward.experts],
            down=[packed_weight(expert.down.product) for expert in feed_forward.experts],
            activation=feed_forward.activation,
            correction=feed_forward.router.correction,
        )
        rows = self.step + NUM_TOKENS
        self.ops += sparse_ops(self.library, layer, self.expert_buffers, rows, x, out, accumulate=join)
        if feed_forward.shared is not None:
            self.feed_forward(feed_forward.shared, x, out, True)


def packed_weight(product: object) -> PackedWeight:
    """The weight of a layer that was packed for the native kernels."""
    assert isinstance(product, NativeProduct), "packed before it is lowered"
    return product.weight
