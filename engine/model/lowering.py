"""Turns a loaded decoder into a program of native ops: one call computes a whole step.

The program is made once for the largest step seen so far; what changes from step to step goes through one
StepStruct. Activations are float32 and row-major in buffers that all layers share. Families that cannot be
lowered are named by `why_not_lowered` and served by torch.

Shape letters: T tokens, R rows whose logits are wanted, E hidden size, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.activation.native import SoftCapArgs
from engine.kernels.attention import AttentionBackend
from engine.kernels.linear.native import (
    NativePacker,
    NativeProduct,
    gemm_args,
    make_workspace,
    product_ops,
)
from engine.kernels.native import NativeLibrary, Op
from engine.kernels.native.library import Program, StepStruct
from engine.kernels.norm.native import RmsNormArgs
from engine.kernels.paged_cache import LayerCache
from engine.model.decoder import Decoder
from engine.model.forward_batch import ForwardBatch
from engine.model.latent_attention import LatentAttention
from engine.model.layers import Linear
from engine.model.program_builder import ProgramBuilder, packed_weight
from engine.model.spec import ModelSpec

# The native cache ops shift by block sizes, and hold one head's vector at a time.
LARGEST_BLOCK = 256
LARGEST_HEAD = 1024
NUM_LOGIT_ROWS = StepStruct.num_logit_rows.offset


def why_not_lowered(spec: ModelSpec, *, block_size: int) -> str:
    """Why a model cannot run as a native program; empty when it can."""
    if spec.cache_key_dim > LARGEST_HEAD:
        return f"heads of {spec.cache_key_dim} elements are larger than {LARGEST_HEAD}"
    if block_size & (block_size - 1) or block_size > LARGEST_BLOCK:
        return f"blocks of {block_size} tokens are not a power of two up to {LARGEST_BLOCK}"
    return ""


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
        self.pool = library.pool(num_threads)
        self._step = StepStruct()
        self._head_step = StepStruct()
        self._caches: list[LayerCache] | None = None
        self._max_tokens = max_tokens
        self._body: Program | None = None
        # The batch that the step points to; its arrays may change in place from one step to the next.
        self._batch: ForwardBatch | None = None
        self._hidden = torch.empty(0, 0)
        # Body and head, and both as one program with the ops around them.
        self._joined: tuple[Program, Program, Program] | None = None
        self._head = self._build_head(16)

    def wake(self) -> None:
        """A step follows shortly: the threads get up while it is prepared."""
        self.library.wake(self.pool)

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
        if batch is not self._batch:
            self._point_to(batch, num_tokens)
        self._body.run(self.pool)
        return self._hidden[:num_tokens]

    def _point_to(self, batch: ForwardBatch, num_tokens: int) -> None:
        step, ragged = self._step, batch.ragged
        step.num_tokens = num_tokens
        step.num_sequences = ragged.context_lens.size
        step.max_blocks = ragged.block_tables.shape[1]
        step.token_ids = batch.token_ids.data_ptr()
        step.positions = batch.positions.data_ptr()
        step.slots = batch.slots.data_ptr()
        step.query_starts = _address(ragged.query_starts)
        step.context_lens = _address(ragged.context_lens)
        step.block_tables = _address(ragged.block_tables)
        self._batch = batch

    def point_to_rows(self, batch: ForwardBatch, rows: NDArray[np.int64]) -> Tensor:
        """Lets `step_program` compute a batch of no more tokens and logit rows [R] than `forward` and
        `logits_of` were asked for before; returns where their logits [R, V] will be.
        """
        self._point_to(batch, int(batch.ragged.query_starts[-1]))
        self._head_norm.x = self._hidden.data_ptr()
        self._head_step.num_logit_rows = rows.size
        self._head_step.logit_rows = _address(rows)
        return self._logits[: rows.size]

    def step_program(self, first: Op, after: Sequence[Op]) -> Program:
        """`first`, then forward and logits of the rows pointed to, then the ops `after`. These ops are the
        same in every call.
        """
        assert self._body is not None, "forward comes first"
        joined = self._joined
        if joined is None or joined[0] is not self._body or joined[1] is not self._head:
            program = Program(self.library, [first, *self._body.ops, *self._head.ops, *after])
            self._joined = joined = (self._body, self._head, program)
        return joined[2]

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
        self._head.run(self.pool)
        return self._logits[: rows.size]

    def weight_bytes(self) -> int:
        """Bytes of packed weights, absorbed projections, embedding table and tables of angles."""
        tables = sum(part.nbytes for rope in self.model.ropes for part in rope)
        absorbed = sum(
            layer.attention.key_up.nbytes + layer.attention.value_up.nbytes
            for layer in self.model.layers
            if isinstance(layer.attention, LatentAttention)
        )
        packed = packed_weight(self.model.head.product).arena.num_bytes()
        return packed + self.model.embedding.nbytes + tables + absorbed

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
            packed_weight(self.model.head.product),
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
        builder = ProgramBuilder(self.model, self.library, self._step, self._max_tokens, self.num_threads)
        self._hidden = builder.stream
        builder.embed()
        for layer, cache in zip(self.model.layers, caches, strict=True):
            builder.layer(layer, cache)
        builder.finish()
        return Program(self.library, builder.ops)


def _address(array: NDArray[np.int64]) -> int:
    assert array.dtype == np.int64
    assert array.flags.c_contiguous
    return int(array.ctypes.data)
