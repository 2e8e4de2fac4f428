"""Turns a loaded decoder into a program of native ops: one call computes a whole step.

The program is made once for the largest step seen so far; what changes from step to step goes through one
StepStruct. Activations are float32 and row-major in buffers that all layers share. Families that cannot be
lowered are named by `why_not_lowered` and served by torch.

Shape letters: T tokens, R rows whose logits are wanted, E hidden size, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.activation.native import KINDS, ActivationArgs, SoftCapArgs
from engine.kernels.attention import AttentionBackend
from engine.kernels.attention.native import AttentionArgs, AttentionPlan, AttentionPlanArgs
from engine.kernels.linear.native import (
    NativePacker,
    NativeProduct,
    PackedWeight,
    gemm_args,
    make_workspace,
    product_ops,
)
from engine.kernels.native import NativeLibrary, Op
from engine.kernels.native.embedding import EmbeddingArgs
from engine.kernels.native.library import Program, StepStruct
from engine.kernels.norm.native import RmsNormArgs
from engine.kernels.paged_cache import LayerCache
from engine.kernels.paged_cache.native import describe
from engine.kernels.rope.native import QK_NORMS, RopeCacheArgs
from engine.model.calibration import linears
from engine.model.decoder import Decoder, DecoderLayer
from engine.model.forward_batch import ForwardBatch
from engine.model.layers import Attention, FeedForward, Linear, Norm
from engine.model.spec import ModelSpec

# The native cache ops shift by block sizes.
LARGEST_BLOCK = 256
NUM_TOKENS = StepStruct.num_tokens.offset
NUM_LOGIT_ROWS = StepStruct.num_logit_rows.offset


def why_not_lowered(spec: ModelSpec, *, block_size: int) -> str:
    """Why a model cannot run as a native program; empty when it can."""
    if spec.experts is not None:
        return "sparse experts have no native op"
    if spec.latent is not None:
        return "latent attention has no native program"
    if block_size & (block_size - 1) or block_size > LARGEST_BLOCK:
        return f"blocks of {block_size} tokens are not a power of two up to {LARGEST_BLOCK}"
    return ""


class NativePacking:
    """Packs a model's weights for the native kernels while it is loaded."""

    def __init__(self, packer: NativePacker) -> None:
        self._packer = packer

    def pack(self, linear: Linear) -> None:
        """Packs weight and bias of a layer; those that were read are let go."""
        assert linear.weight is not None, "packed once"
        packed = self._packer.pack(linear.weight, linear.bias)
        linear.use_packed(NativeProduct(packed, num_threads=self._packer.num_threads))


class NativeDecoder:
    """A decoder whose steps are native programs; `model` has packed weights. Not thread-safe."""

    # Rows of a step are padded to a multiple of this.
    row_multiple = 1

    def __init__(
        self, model: Decoder, library: NativeLibrary, *, num_threads: int, max_tokens: int = 256
    ) -> None:
        self.model = model
        self.spec = model.spec
        self.max_model_len = model.max_model_len
        self.device = model.device
        self.library = library
        self.num_threads = num_threads
        self._pool = library.pool(num_threads)
        self._step = StepStruct()
        self._head_step = StepStruct()
        self._caches: list[LayerCache] | None = None
        self._max_tokens = max_tokens
        self._body: Program | None = None
        self._hidden = torch.empty(0, 0)
        self._head = self._build_head(16)

    def wake(self) -> None:
        """A step follows shortly: the threads get up while it is prepared."""
        self.library.wake(self._pool)

    def forward(self, batch: ForwardBatch, caches: list[LayerCache], attention: AttentionBackend) -> Tensor:
        """Hidden states [T, E] of the step's tokens, before the final norm; fills `caches`, which are the
        same in every call. They stay valid until the next step. (The attention is the program's own.)
        """
        ragged = batch.ragged
        num_tokens = int(ragged.query_starts[-1])
        if self._body is None or num_tokens > self._max_tokens or self._caches is not caches:
            self._max_tokens = max(self._max_tokens, num_tokens)
            self._caches = caches
            self._body = self._build_body(caches)
        step = self._step
        step.num_tokens = num_tokens
        step.num_sequences = ragged.context_lens.size
        step.max_blocks = ragged.block_tables.shape[1]
        step.token_ids = batch.token_ids.data_ptr()
        step.positions = batch.positions.data_ptr()
        step.slots = batch.slots.data_ptr()
        step.query_starts = _address(ragged.query_starts)
        step.context_lens = _address(ragged.context_lens)
        step.block_tables = _address(ragged.block_tables)
        self._body.run(self._pool)
        return self._hidden[:num_tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, E] -> [R, V] in float32, valid until the next call."""
        return self.logits_of(hidden, np.arange(hidden.shape[0]))

    def logits_of(self, hidden: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """Logits [R, V] of some rows of hidden [T, E], valid until the next call."""
        hidden = hidden.float().contiguous()
        if rows.size > self._logits.shape[0]:
            self._head = self._build_head(max(rows.size, 2 * self._logits.shape[0]))
        self._head_norm.x = hidden.data_ptr()
        self._head_step.num_logit_rows = rows.size
        self._head_step.logit_rows = _address(rows)
        self._head.run(self._pool)
        return self._logits[: rows.size]

    def weight_bytes(self) -> int:
        """Bytes of packed weights, embedding table and tables of angles."""
        tables = sum(part.nbytes for rope in self.model.ropes for part in rope)
        return _packed(self.model.head.product).arena.num_bytes() + self.model.embedding.nbytes + tables

    def _build_head(self, max_rows: int) -> Program:
        spec, library, step = self.spec, self.library, ctypes.addressof(self._head_step)
        normed = torch.empty(max_rows, spec.hidden_size)
        self._logits = torch.empty(max_rows, spec.vocab_size)
        norm = self.model.norm
        self._head_norm = RmsNormArgs(
            step=step,
            weight=norm.weight.data_ptr(),
            out=normed.data_ptr(),
            width=spec.hidden_size,
            logit_rows=1,
            eps=norm.eps,
        )
        workspace = make_workspace(library, max_rows, spec.hidden_size, self.num_threads)
        head = gemm_args(
            _packed(self.model.head.product),
            step + NUM_LOGIT_ROWS,
            normed.data_ptr(),
            self._logits.data_ptr(),
            workspace.data_ptr(),
        )
        ops = [
            Op(library, "rms_norm", self._head_norm, norm.weight),
            *product_ops(library, head, normed, workspace),
        ]
        if spec.logit_soft_cap is not None:
            cap = SoftCapArgs(
                step=step, logits=self._logits.data_ptr(), width=spec.vocab_size, cap=spec.logit_soft_cap
            )
            ops.append(Op(library, "soft_cap", cap))
        return Program(library, ops)

    def _build_body(self, caches: list[LayerCache]) -> Program:
        builder = _Builder(self.model, self.library, self._step, self._max_tokens, self.num_threads)
        self._hidden = builder.stream
        builder.embed()
        for layer, cache in zip(self.model.layers, caches, strict=True):
            builder.layer(layer, cache)
        builder.finish()
        return Program(self.library, builder.ops)


class _Builder:
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
        widest = max(_packed(linear.product).inputs for layer in model.layers for linear in linears(layer))
        self.workspace = make_workspace(library, max_tokens, widest, num_threads)
        self.plan: AttentionPlan | None = None

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
        bfloat16 = table.dtype == torch.bfloat16
        args = EmbeddingArgs(
            self.step,
            table.data_ptr(),
            self.stream.data_ptr(),
            self.spec.hidden_size,
            bfloat16,
            self._embedding_scale(table.dtype),
        )
        self.add("embedding", args, table)

    def _embedding_scale(self, dtype: torch.dtype) -> float:
        """As the torch back end rounds it."""
        return float(torch.tensor(self.spec.embedding_scale, dtype=dtype))

    def layer(self, layer: DecoderLayer, cache: LayerCache) -> None:
        """Attention and feed-forward."""
        attention, feed_forward = layer.attention, layer.feed_forward
        assert isinstance(attention, Attention)
        assert isinstance(feed_forward, FeedForward)
        self.half(
            layer.before[0],
            layer.after[0],
            lambda x, out, join: self.attention(attention, cache, x, out, join),
        )
        self.half(
            layer.before[1],
            layer.after[1],
            lambda x, out, join: self.feed_forward(feed_forward, x, out, join),
        )

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
        weight = _packed(linear.product)
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
        described = describe(cache)
        qkv = self.buffer("qkv", sum(attention.sizes))
        mixed = self.buffer("mixed", attention.sizes[0])
        self.product(attention.qkv, x, qkv, False)
        self.rotate(attention, described, qkv)
        if self.plan is None:
            self.plan = AttentionPlan(
                self.library,
                num_heads=attention.num_heads,
                num_kv_heads=attention.num_kv_heads,
                value_dim=attention.head_dim,
                block_size=cache.block_size,
            )
            self.add("attention_plan", AttentionPlanArgs(self.step, self.plan.address), self.plan)
        options = attention.options
        args = AttentionArgs(
            step=self.step,
            plan=self.plan.address,
            q=qkv.data_ptr(),
            out=mixed.data_ptr(),
            sinks=None if attention.sinks is None else attention.sinks.data_ptr(),
            cache=described,
            num_heads=attention.num_heads,
            q_stride=qkv.stride(0),
            out_stride=mixed.stride(0),
            window=options.window or 0,
            scale=options.scale,
            soft_cap=options.soft_cap or 0.0,
        )
        self.add("attention", args, attention, cache, qkv, mixed)
        self.product(attention.output, mixed, out, join)

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

    def feed_forward(self, feed_forward: FeedForward, x: Tensor, out: Tensor, join: bool) -> None:
        """Gate and up, their activation in place, down."""
        width = _packed(feed_forward.down.product).inputs
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


def _packed(product: object) -> PackedWeight:
    assert isinstance(product, NativeProduct), "packed before it is lowered"
    return product.weight


def _address(array: NDArray[np.int64]) -> int:
    assert array.dtype == np.int64
    assert array.flags.c_contiguous
    return int(array.ctypes.data)
