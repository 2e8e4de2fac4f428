"""Attention by the native kernels; attention.h says how the work is cut and why rows keep their bits.

Shape letters: T tokens, H query heads, D key dim, E value dim.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from kernels.attention.native_ops import AttentionArgs, AttentionPlanArgs, NativeAttentionPlan
from kernels.attention.ragged import AttentionOptions, RaggedBatch
from kernels.native.library import NativeLibrary, Op, StepStruct, load_native
from kernels.paged_cache.native import describe
from kernels.paged_cache.store import LayerCache


class _Step:
    """A step's description in memory."""

    def __init__(self, batch: RaggedBatch) -> None:
        self.batch = batch
        # The kernels read plain arrays of int64.
        self._arrays = [
            np.ascontiguousarray(part, np.int64)
            for part in (batch.query_starts, batch.context_lens, batch.block_tables)
        ]
        starts, lens, tables = (array.ctypes.data for array in self._arrays)
        self.num_tokens = int(batch.query_starts[-1])
        self.struct = StepStruct(
            num_tokens=self.num_tokens,
            num_sequences=len(batch.context_lens),
            max_blocks=batch.block_tables.shape[1],
            query_starts=starts,
            context_lens=lens,
            block_tables=tables,
            votes=None if batch.votes is None else batch.votes.ctypes.data,
        )


class NativeAttention:
    """See the module. Raises NativeUnavailableError where the kernels cannot be had."""

    name = "native"

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        library: NativeLibrary | None = None,
        num_threads: int = 0,
        share: bool = True,
        pairs: bool | None = None,
    ) -> None:
        """share: sequences that hold blocks in common read them once. pairs: keys and values of bfloat16 are
        multiplied in pairs, or values in float16, where the level can; None leaves that to the kind of
        processor.
        """
        self.num_heads, self.num_kv_heads, self.share, self.pairs = num_heads, num_kv_heads, share, pairs
        self.library = library or load_native()
        self.num_threads = num_threads or torch.get_num_threads()
        self._plans: dict[tuple[int, int, int], NativeAttentionPlan] = {}

    def plan(self, batch: RaggedBatch, device: torch.device) -> _Step:
        """The work is cut when the first layer of a kind runs."""
        return _Step(batch)

    def run(
        self,
        plan: _Step,
        q: Tensor,
        cache: LayerCache,
        options: AttentionOptions,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, H, D] (T may be padded) -> [T, H, E]. sinks [H] are extra scores that attend to nothing."""
        described = describe(cache)
        value_dim = described.value_dim or described.shared_value_dim
        queries = q.float().contiguous()
        out = torch.empty(q.shape[0], q.shape[1], value_dim)
        out[plan.num_tokens :] = 0.0
        ops, work = self._planned(plan, value_dim, options.ahead)
        args = AttentionArgs(
            step=ctypes.addressof(plan.struct),
            plan=work.address,
            q=queries.data_ptr(),
            out=out.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            cache=described,
            num_heads=self.num_heads,
            q_stride=queries.shape[1] * queries.shape[2],
            out_stride=out.shape[1] * value_dim,
            window=options.window or 0,
            chunk=options.chunk or 0,
            scale=options.scale,
            soft_cap=options.soft_cap or 0.0,
            ahead=options.ahead,
            vote_row=0,
        )
        ops.append(Op(self.library, "attention", args))
        self.library.run(ops, num_threads=self.num_threads)
        return out.to(q.dtype)

    def _planned(self, step: _Step, value_dim: int, ahead: int) -> tuple[list[Op], NativeAttentionPlan]:
        """The plan for a value dim and a view ahead, and what must run before it is valid for the step."""
        key = (value_dim, step.batch.block_size, ahead)
        if key not in self._plans:
            self._plans[key] = NativeAttentionPlan(
                self.library,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                value_dim=value_dim,
                block_size=step.batch.block_size,
                share=self.share,
                pairs=self.pairs,
            )
        work = self._plans[key]
        if work.step is step:
            return [], work
        work.step = step
        args = AttentionPlanArgs(step=ctypes.addressof(step.struct), plan=work.address, ahead=ahead)
        return [Op(self.library, "attention_plan", args)], work
