"""Prefill chunks by flash-attn, every other row by another back end (Triton).

flash-attn computes on tensor cores what Triton's tiles compute more slowly; decode reads memory, which both
do at its rate, and Triton's splits do not depend on the batch, as flash-attn's own would. So a sequence with
more than FEW_ROWS new tokens goes to flash-attn, which depends on that sequence alone.

Blocks are read in place where the library takes their size, the cache is in the queries' type, and the layer
has no window. Otherwise the visible history is gathered first: into vectors side by side, in the queries'
type, positions that nobody may see left out. For a chunk of 2,048 tokens that is about a twentieth of the
time that attention itself takes, whatever the history (counted from bytes and operations, not measured).

Shape letters: T tokens, H query heads, K kv heads, D head dim, U gathered positions, S sequences, C blocks of
the longest sequence, N blocks, P block size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache as once
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention.flash_library import FlashLibrary, Span, find_library
from kernels.attention.ragged import AttentionOptions, DecodeBatch, RaggedBatch
from kernels.host import on_device
from kernels.paged_cache.store import LayerCache, PlainCache, QuantizedCache, as_bytes

FEW_ROWS = 16
# Positions of one call whose history is gathered; sequences with longer ones stay with the other back end.
GATHERED_POSITIONS = 1 << 17


@dataclass(frozen=True)
class _Call:
    """Sequences that go to flash-attn together, under one window."""

    rows: slice | Tensor
    span: Span
    # Read in place: tables [S, C] int32. Gathered: block and offset of each position, [2, U] int64.
    where: Tensor


@dataclass
class FlashPlan:
    """One step with at least one sequence for flash-attn."""

    batch: RaggedBatch
    device: torch.device
    groups: list[NDArray[np.int64]]
    # Rows and plan of the other back end.
    rest_rows: slice | Tensor | None
    rest: Any
    # By window, and whether blocks are read in place.
    calls: dict[tuple[int | None, bool], list[_Call]] = field(default_factory=dict)


class FlashAttention:
    """See the module. `rest` computes what flash-attn does not; it is Triton's unless given."""

    name = "flash"

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, rest: Any = None, library: FlashLibrary | None = None
    ) -> None:
        if rest is None:
            from kernels.attention.triton_attention import TritonAttention

            rest = TritonAttention(num_heads=num_heads, num_kv_heads=num_kv_heads)
        self.rest = rest
        self.library = library or installed_library()

    def plan(self, batch: RaggedBatch, device: torch.device) -> Any:
        """The other back end's plan when no sequence has many rows."""
        if batch.is_by_block:
            # Keys of two kinds.
            return self.rest.plan(batch, device)
        many = (batch.query_lens > FEW_ROWS) & (batch.context_lens <= GATHERED_POSITIONS)
        if not many.any():
            return self.rest.plan(batch, device)
        few = np.flatnonzero(~many)
        return FlashPlan(
            batch=batch,
            device=device,
            groups=_groups(np.flatnonzero(many), batch.context_lens),
            rest_rows=_rows_of(batch, few, device) if few.size else None,
            rest=self.rest.plan(_part_of(batch, few), device) if few.size else None,
        )

    def plan_decode(self, batch: DecodeBatch) -> Any:
        """The other back end's."""
        return self.rest.plan_decode(batch)

    def begin(self, plan: Any) -> None:
        """The other back end's: only steps of decode rows are captured."""
        self.rest.begin(plan)

    def captured_workspace_bytes(self, rows: int, max_context_len: int, head_dim: int) -> int:
        """The other back end's."""
        return int(self.rest.captured_workspace_bytes(rows, max_context_len, head_dim))

    def run(
        self,
        plan: Any,
        q: Tensor,
        cache: LayerCache,
        options: AttentionOptions,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, H, D] (T may be padded) -> [T, H, D]."""
        if not isinstance(plan, FlashPlan):
            rest: Tensor = self.rest.run(plan, q, cache, options, sinks)
            return rest
        assert sinks is None, "the choice of back end knows what flash-attn cannot do"
        assert isinstance(cache, PlainCache | QuantizedCache)
        in_place = (
            isinstance(cache, PlainCache)
            and cache.keys.dtype == q.dtype
            and options.window is None
            and self.library.takes_pages(cache.block_size)
        )
        kind = options.window, in_place
        if kind not in plan.calls:
            plan.calls[kind] = [_call(plan, group, *kind) for group in plan.groups]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        out[int(plan.batch.query_starts[-1]) :] = 0
        for call in plan.calls[kind]:
            out[call.rows] = self._attend(call, q[call.rows], cache, options, in_place)
        if plan.rest_rows is not None:
            out[plan.rest_rows] = self.rest.run(plan.rest, q[plan.rest_rows], cache, options)
        return out

    def _attend(
        self,
        call: _Call,
        q: Tensor,
        cache: PlainCache | QuantizedCache,
        options: AttentionOptions,
        in_place: bool,
    ) -> Tensor:
        assert cache.values is not None, "the choice of back end knows what flash-attn cannot do"
        how = {
            "softmax_scale": options.scale,
            "softcap": options.soft_cap or 0.0,
            "window_size": (-1, -1) if options.window is None else (options.window - 1, 0),
        }
        keys, values = cache.keys.transpose(1, 2), cache.values.transpose(1, 2)  # [N, P, K, D]
        if in_place:
            return self.library.attend_pages(q, keys, values, call.where, call.span, **how)
        blocks, offsets = call.where.unbind()
        if isinstance(cache, PlainCache):
            keys, values = keys[blocks, offsets], values[blocks, offsets]  # [U, K, D]
        else:
            kind = keys.dtype
            keys, values = (as_bytes(part)[blocks, offsets].view(kind) for part in (keys, values))
            scales = cache.scales.transpose(1, 2)[blocks, offsets]  # [U, K, 2]
            keys, values = keys.float() * scales[..., :1], values.float() * scales[..., 1:]
        return self.library.attend(q, keys.to(q.dtype), values.to(q.dtype), call.span, **how)


@once
def installed_library() -> FlashLibrary:
    """The library for the current GPU. Raises FlashUnavailableError."""
    device = torch.device("cuda", torch.cuda.current_device())
    return find_library(device, torch.cuda.get_device_capability(device))


def _groups(sequences: NDArray[np.int64], context_lens: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Sequences cut into calls of at most GATHERED_POSITIONS positions of history."""
    groups: list[list[int]] = []
    left = 0
    for sequence in sequences.tolist():
        length = int(context_lens[sequence])
        if not groups or length > left:
            groups.append([])
            left = GATHERED_POSITIONS
        groups[-1].append(sequence)
        left -= length
    return [np.array(group, np.int64) for group in groups]


def _call(plan: FlashPlan, group: NDArray[np.int64], window: int | None, in_place: bool) -> _Call:
    batch, device = plan.batch, plan.device
    query_lens, ends = batch.query_lens[group], batch.context_lens[group]
    begins = np.zeros_like(ends)
    if window is not None:
        begins = np.maximum(ends - query_lens - window + 1, 0)
    lens = ends - begins
    key_starts = np.concatenate(([0], np.cumsum(lens)))
    tables = batch.block_tables[group, : -(-int(ends.max()) // batch.block_size)]
    where = tables.astype(np.int32)
    if not in_place:
        owners = np.repeat(np.arange(group.size), lens)
        positions = np.arange(key_starts[-1]) - key_starts[owners] + begins[owners]
        blocks = tables[owners, positions // batch.block_size]
        where = np.stack((blocks, positions % batch.block_size))

    def whole(array: NDArray[Any]) -> Tensor:
        return on_device(array.astype(np.int32), device)

    return _Call(
        rows=_rows_of(batch, group, device),
        span=Span(
            query_starts=whole(np.concatenate(([0], np.cumsum(query_lens)))),
            key_starts=whole(key_starts),
            context_lens=whole(ends),
            max_query_len=int(query_lens.max()),
            max_context_len=int(lens.max()),
        ),
        where=on_device(np.ascontiguousarray(where), device),
    )


def _part_of(batch: RaggedBatch, sequences: NDArray[np.int64]) -> RaggedBatch:
    """Some sequences of a batch, their tokens side by side."""
    return RaggedBatch(
        query_starts=np.concatenate(([0], np.cumsum(batch.query_lens[sequences]))),
        context_lens=batch.context_lens[sequences],
        block_tables=batch.block_tables[sequences],
        block_size=batch.block_size,
    )


def _rows_of(batch: RaggedBatch, sequences: NDArray[np.int64], device: torch.device) -> slice | Tensor:
    """Rows of some sequences: a slice where they are neighbours."""
    first, last = int(sequences[0]), int(sequences[-1])
    if last - first + 1 == sequences.size:
        return slice(int(batch.query_starts[first]), int(batch.query_starts[last + 1]))
    rows = [np.arange(*batch.query_starts[index : index + 2]) for index in sequences.tolist()]
    return on_device(np.concatenate(rows).astype(np.int64), device)
