"""Attention over the paged cache in Triton: prefill chunks, decode and verification of one ragged batch.

Online softmax (FlashAttention, arXiv 2205.14135) over the pieces that triton_plan cuts; pieces of a split
history merge as in FlashDecoding. The heads of a group sit in one tile with their tokens, so that keys and
values are read once for all of them. A value that is the beginning of its key (MLA) is not read a second
time.

Shape letters: T tokens, H query heads, K kv heads, D key dim, E value dim, N blocks, P block size, G heads of
a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.attention.launch_shape import LaunchShape, launch_shape, next_smaller
from kernels.attention.ragged import AttentionOptions, DecodeBatch, RaggedBatch
from kernels.attention.triton_kernels import attention_kernel, list_parts_kernel, merge_kernel
from kernels.attention.triton_plan import Items, make_plan, most_parts
from kernels.attention.tuning import arch_of
from kernels.host import on_device
from kernels.paged_cache.channel_cache import ChannelCache
from kernels.paged_cache.store import PlainCache, QuantizedCache
from kernels.paged_cache.triton_four_bits import turn_rows

PROGRAMS_PER_PROCESSOR = 6
# What the kernels read.
DenseCache = PlainCache | QuantizedCache | ChannelCache


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """A plan's arrays on the device."""

    num_parts: int
    positions: Tensor
    part_base: Tensor
    part_count: Tensor
    tables: Tensor
    # Rows and fields of the items; None where there are none.
    split: tuple[Tensor, Tensor] | None
    whole: tuple[Tensor, Tensor] | None
    # Where the device lists the items: how many there are [1].
    num_listed: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class EagerPlan:
    """A step, and what is made of it by window when a layer first needs it: layers with the same window share
    one.
    """

    batch: RaggedBatch
    device: torch.device
    made: dict[int | None, DevicePlan] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CapturedPlan:
    """Steps of so many rows of one token each; what depends on their contexts is made on the device."""

    batch: DecodeBatch
    # Number of each row, and of its first part [B] int32: graphs read them, so they live as long.
    row_numbers: Tensor
    part_base: Tensor
    # By window; forgotten at the beginning of each step.
    made: dict[int | None, DevicePlan] = field(default_factory=dict)

    def first(self, rows: int) -> CapturedPlan:
        """See CapturedSteps."""
        return CapturedPlan(
            batch=self.batch.first(rows), row_numbers=self.row_numbers[:rows], part_base=self.part_base[:rows]
        )

    def of(self, window: int | None) -> DevicePlan:
        """The step's work under a window; made when a layer first needs it."""
        if window not in self.made:
            self.made[window] = self._list(window)
        return self.made[window]

    def _list(self, window: int | None) -> DevicePlan:
        device, rows = self.part_base.device, self.part_base.shape[0]
        most = most_parts(self.batch.max_context_len)
        capacity = rows * most
        positions, part_count = (torch.empty_like(self.part_base) for _ in range(2))
        fields = torch.empty(6, capacity, dtype=torch.int32, device=device)
        num_listed = torch.empty(1, dtype=torch.int32, device=device)
        list_parts_kernel[(1,)](
            self.batch.context_lens,
            positions,
            part_count,
            fields,
            num_listed,
            rows,
            capacity,
            most,
            window or 0,
            ROWS=max(16, triton.next_power_of_2(rows)),
            WINDOW=window is not None,
        )
        return DevicePlan(
            num_parts=capacity,
            positions=positions,
            part_base=self.part_base,
            part_count=part_count,
            tables=self.batch.block_tables,
            split=(self.row_numbers, fields),
            whole=None,
            num_listed=num_listed,
        )


class ShapeRefusedError(Exception):
    """The device has no room for a launch shape; the next launch has a smaller one."""


class TritonAttention:
    """The back end of GPUs."""

    name = "triton"

    def __init__(self, *, num_heads: int, num_kv_heads: int, arch: str = "") -> None:
        # Architecture to compile for; empty asks the device.
        self._arch = arch
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.group = num_heads // num_kv_heads
        # Launch shapes used instead of those that did not fit into the device's shared memory.
        self.smaller: dict[tuple[int, torch.dtype, torch.dtype, bool], LaunchShape] = {}

    def plan(self, batch: RaggedBatch, device: torch.device) -> EagerPlan:
        """See AttentionBackend."""
        return EagerPlan(batch=batch, device=device)

    def plan_decode(self, batch: DecodeBatch) -> CapturedPlan:
        """See CapturedAttention."""
        rows, device = batch.context_lens.shape[0], batch.context_lens.device
        numbers = torch.arange(rows, dtype=torch.int32, device=device)
        return CapturedPlan(
            batch=batch, row_numbers=numbers, part_base=numbers * most_parts(batch.max_context_len)
        )

    def begin(self, plan: CapturedPlan) -> None:
        """See CapturedAttention."""
        plan.made.clear()

    def captured_workspace_bytes(self, rows: int, max_context_len: int, head_dim: int) -> int:
        """See CapturedAttention: sums and their two numbers per part and head, and the parts' own fields."""
        parts = rows * most_parts(max_context_len)
        return parts * (self.num_heads * (head_dim + 2) * 4 + 6 * 4)

    def run(
        self,
        plan: EagerPlan | CapturedPlan,
        q: Tensor,
        cache: DenseCache,
        options: AttentionOptions,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, H, D] (T may be padded) -> [T, H, E]. sinks [H] are extra scores that attend to nothing."""
        q = q.contiguous()
        if isinstance(cache, ChannelCache):
            # Values are rotated; nothing else of attention knows of it.
            return turn_rows(self._attended(plan, q, cache, options, sinks), back=True)
        return self._attended(plan, q, cache, options, sinks)

    def _attended(
        self,
        plan: EagerPlan | CapturedPlan,
        q: Tensor,
        cache: DenseCache,
        options: AttentionOptions,
        sinks: Tensor | None,
    ) -> Tensor:
        while True:
            if isinstance(plan, CapturedPlan):
                work = plan.of(options.window)
            else:
                if options.window not in plan.made:
                    plan.made[options.window] = self._device_plan(plan, options.window, q, cache)
                work = plan.made[options.window]
            try:
                return self._run(work, q, cache, options, sinks)
            except ShapeRefusedError:
                if isinstance(plan, EagerPlan):
                    # Cut for the tiles of the shape that was refused.
                    plan.made.clear()

    def _key(
        self, q: Tensor, cache: DenseCache, *, final: bool
    ) -> tuple[int, torch.dtype, torch.dtype, bool]:
        return q.shape[-1], q.dtype, cache.keys.dtype, final

    def _shape(self, q: Tensor, cache: DenseCache, *, final: bool) -> LaunchShape:
        """The shape chosen at start, or what a device without room for it takes."""
        return self.smaller.get(self._key(q, cache, final=final)) or launch_shape(
            group=self.group,
            key_dim=q.shape[-1],
            final=final,
            kv=_kv_of(cache),
            wide=q.element_size() > 2,
            arch=self._arch or arch_of(q.device),
        )

    def _bulk(self, q: Tensor, cache: DenseCache, shape: LaunchShape) -> bool:
        """Whether steps are fetched by Hopper's copy engine: each must be one piece of one block."""
        hopper = (self._arch or arch_of(q.device)) >= "sm_90"
        if not hopper or cache.block_size % shape.step or cache.keys.dtype == torch.uint8:
            return False
        dims = [store.shape[-1] for store in (cache.keys, cache.values) if store is not None]
        aligned = all(dim * cache.keys.element_size() % 16 == 0 for dim in dims)
        main = cache.shared_value_dim if cache.values is None else dims[0]
        # Columns beyond a key are filled with zeros, those of its tail are not.
        return aligned and q.element_size() == 2 and main in (dims[0], _block(main))

    def _device_plan(self, plan: EagerPlan, window: int | None, q: Tensor, cache: DenseCache) -> DevicePlan:
        assert plan.batch.is_by_block or not isinstance(cache, ChannelCache), "cut at blocks"
        split, whole = (self._shape(q, cache, final=final) for final in (False, True))
        made = make_plan(
            plan.batch,
            split_rows=split.tile // split.heads,
            tile_rows=whole.tile // whole.heads,
            window=window,
        )
        there = partial(on_device, device=plan.device)

        def items(some: Items) -> tuple[Tensor, Tensor] | None:
            return (there(some.rows), there(some.fields)) if some.rows.size else None

        return DevicePlan(
            num_parts=made.num_parts,
            positions=there(made.positions),
            part_base=there(made.part_base),
            part_count=there(made.part_count),
            tables=there(made.block_tables),
            split=items(made.split),
            whole=items(made.whole),
        )

    def _run(
        self,
        plan: DevicePlan,
        q: Tensor,
        cache: DenseCache,
        options: AttentionOptions,
        sinks: Tensor | None,
    ) -> Tensor:
        value_dim = _value_dim(cache)
        # Rows that pad an eager step are nobody's work.
        empty = torch.zeros if plan.num_listed is None else torch.empty
        out = empty(q.shape[0], self.num_heads, value_dim, dtype=q.dtype, device=q.device)
        parts = max(1, plan.num_parts)
        sums = torch.empty(parts, self.num_heads, value_dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(parts, self.num_heads, 2, dtype=torch.float32, device=q.device)
        for work, final in ((plan.split, False), (plan.whole, True)):
            if work is not None:
                self._attend(plan, work, (q, out, sums, stats), cache, options, sinks, final=final)
        if plan.split is not None:
            merge_kernel[(plan.part_count.shape[0], self.num_heads)](
                sums,
                stats,
                out,
                sinks if sinks is not None else stats,
                plan.part_base,
                plan.part_count,
                self.num_heads,
                VALUE_DIM=value_dim,
                BLOCK=triton.next_power_of_2(value_dim),
                SINKS=sinks is not None,
            )
        return out

    def _attend(
        self,
        plan: DevicePlan,
        work: tuple[Tensor, Tensor],
        tensors: tuple[Tensor, Tensor, Tensor, Tensor],
        cache: DenseCache,
        options: AttentionOptions,
        sinks: Tensor | None,
        *,
        final: bool,
    ) -> None:
        """Launches the kernel for one kind of items. Raises ShapeRefusedError."""
        q, out, _, stats = tensors
        key_dim, value_dim, shared = q.shape[-1], out.shape[-1], cache.values is None
        main = value_dim if shared else key_dim
        sizes = (main, key_dim - main, value_dim)
        shape = self._shape(q, cache, final=final)
        bulk = final and self._bulk(q, cache, shape)
        stored = _described(cache, main, shape.step) if bulk else _stored(cache)
        num_items, width = work[1].shape[1], self.num_heads // shape.heads
        programs = num_items
        if plan.num_listed is not None:
            programs = min(num_items, -(-_programs_at_once(q.device) // width))
        try:
            attention_kernel[(programs, width)](
                *tensors,
                *stored,
                cache.scales if cache.scales is not None else stats,
                _whole_keys(cache),
                sinks if sinks is not None else stats,
                plan.tables,
                plan.positions,
                plan.part_base,
                *work,
                num_items,
                plan.num_listed if plan.num_listed is not None else work[1],
                plan.tables.stride(0),
                self.num_heads,
                self.num_kv_heads,
                (options.scale, options.soft_cap or 1.0, options.window or 0),
                SIZES=(*sizes, *(_block(size) for size in sizes)),
                GROUP=shape.heads,
                CHUNKS=self.group // shape.heads,
                BLOCK_SIZE=cache.block_size,
                TILE=shape.tile,
                STEP=shape.step,
                SHARED_VALUE=shared,
                SCALES=0 if cache.scales is None else cache.scales.shape[3],
                SOFT_CAP=options.soft_cap is not None,
                WINDOW=options.window is not None,
                SINKS=sinks is not None,
                BULK=bulk,
                FINAL=final,
                LISTED=plan.num_listed is not None,
                HALF=not final and q.dtype == torch.bfloat16 and _kv_of(cache) == "fp8",
                num_warps=shape.num_warps,
                num_stages=shape.num_stages,
            )
        except OutOfResources as error:
            self.smaller[self._key(q, cache, final=final)] = next_smaller(shape, error)
            raise ShapeRefusedError from error


def _kv_of(cache: DenseCache) -> str:
    if isinstance(cache, PlainCache):
        return "plain"
    if isinstance(cache, ChannelCache):
        return cache.type_name
    return "int8" if cache.keys.dtype == torch.int8 else "fp8"


def _value_dim(cache: DenseCache) -> int:
    if cache.values is None:
        return cache.shared_value_dim
    return int(cache.values.shape[-1]) * (2 if cache.keys.dtype == torch.uint8 else 1)


def _stored(cache: DenseCache) -> tuple[Tensor, Tensor, Tensor]:
    """Where the kernel finds keys, their tails and values."""
    return cache.keys, cache.keys, cache.keys if cache.values is None else cache.values


def _whole_keys(cache: DenseCache) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Channels, blocks of whole keys that steps share and those of this one, which each sequence has, and how
    many there are of the first; of other caches anything.
    """
    if not isinstance(cache, ChannelCache):
        return cache.keys, cache.keys, cache.keys, cache.keys, 0
    assert cache.recent is not None, "a step has begun"
    assert cache.step is not None, "with room for its keys"
    own = cache.recent if cache.own is None else cache.own
    return cache.channels, cache.recent, own, cache.step.rows, cache.recent.shape[0]


def _described(cache: DenseCache, main: int, step: int) -> tuple[TensorDescriptor | Tensor, ...]:
    """The same for bulk copies of `step` vectors; what a kernel does not use is a tensor."""

    def described(store: Tensor, size: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(store.view(-1, store.shape[-1]), [step, _block(size)])

    keys = cache.keys
    tail = keys.shape[-1] - main
    return (
        described(keys, main),
        described(keys, tail) if tail else keys,
        keys if cache.values is None else described(cache.values, cache.values.shape[-1]),
    )


def _programs_at_once(device: torch.device) -> int:
    """Programs that share a list: as many as run at the same time, several on each multiprocessor."""
    if device.type != "cuda":
        return 8
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def _block(size: int) -> int:
    """A tile's width: a power of two, and at least what a matrix unit takes."""
    return max(16, triton.next_power_of_2(size)) if size else 16
