"""Attention over the paged cache in Triton: prefill chunks, decode and verification of one ragged batch.

Online softmax (FlashAttention, arXiv 2205.14135) over the pieces that triton_plan cuts; pieces of a split
history merge as in FlashDecoding. The heads of a group sit in one tile with their tokens, so that keys and
values are read once for all of them. A value that is the beginning of its key (MLA) is not read a second
time.

Shape letters: T tokens, H query heads, K kv heads, D key dim, E value dim, N blocks, P block size, G heads of
a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention.ragged import AttentionOptions, DecodeBatch, RaggedBatch
from engine.kernels.attention.triton_plan import MOST_PARTS, PART, Items, make_plan, most_parts
from engine.kernels.attention.tuning import arch_of, key_of, tuned_shape
from engine.kernels.paged_cache.store import PlainCache, QuantizedCache
from engine.kernels.transfer import on_device

LOG2_E = tl.constexpr(1.4426950408889634)
# Largest tile, step, warps, stages: for keys of up to 128 numbers, and for larger ones.
WHOLE_SHAPES = ((128, 32, 8, 3), (64, 32, 8, 2))
# Converting a quantized cache takes registers.
QUANTIZED_WHOLE_SHAPE = (64, 64, 8, 3)
# Hopper's matrix units take wide steps, and its accumulators leave room for them.
HOPPER_WHOLE_SHAPE = (128, 64, 8, 3)
SPLIT_SHAPES = ((64, 64, 4, 3), (64, 32, 8, 2))
PROGRAMS_PER_PROCESSOR = 6
# For latent attention, whose keys have 576.
LATENT_SHAPE = (32, 32, 8, 2)


@triton.jit
def _vectors(
    base, at, there, FIRST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """Elements [FIRST, FIRST + SIZE) of the vectors that begin at base + at [rows], as [rows, BLOCK]; zeros
    beyond SIZE, and where MASKED also in rows that are not `there`.
    """
    place = tl.arange(0, BLOCK)
    entries = base + at[:, None] + (FIRST + place)[None, :]
    if SIZE == BLOCK:
        if MASKED:
            loaded = tl.load(entries, mask=there[:, None], other=0.0)
        else:
            loaded = tl.load(entries)
    elif MASKED:
        loaded = tl.load(entries, mask=there[:, None] & (place < SIZE)[None, :], other=0.0)
    else:
        loaded = tl.load(entries, mask=(place < SIZE)[None, :], other=0.0)
    return loaded


@triton.jit
def _advance(
    start,
    end,
    largest,
    weight,
    total,
    q_main,
    q_tail,
    position,
    table,
    keys,
    values,
    scales,
    kv_head,
    num_kv_heads,
    scale,
    soft_cap,
    window,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    MAIN_BLOCK: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STEP: tl.constexpr,
    SHARED_VALUE: tl.constexpr,
    SCALED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Takes positions [start, start + STEP) in. Unless MASKED, every row sees all of them; the arithmetic is
    the same, so that no bit depends on which it was.
    """
    DTYPE: tl.constexpr = q_main.dtype
    KEY_DIM: tl.constexpr = MAIN + TAIL
    place = start + tl.arange(0, STEP)
    there = place < end
    if MASKED:
        block = tl.load(table + place // BLOCK_SIZE, mask=there, other=0)
    else:
        block = tl.load(table + place // BLOCK_SIZE)
    slot = (block.to(tl.int64) * num_kv_heads + kv_head) * BLOCK_SIZE + place % BLOCK_SIZE
    key = _vectors(keys, slot * KEY_DIM, there, 0, MAIN, MAIN_BLOCK, MASKED).to(DTYPE)
    score = tl.dot(q_main, tl.trans(key), input_precision="ieee")
    if TAIL > 0:
        tail = _vectors(keys, slot * KEY_DIM, there, MAIN, TAIL, TAIL_BLOCK, MASKED).to(DTYPE)
        score = tl.dot(q_tail, tl.trans(tail), score, input_precision="ieee")
    if SCALED:
        score *= tl.load(scales + slot * 2, mask=there, other=0.0)[None, :]
    # Scores are exp2's argument once multiplied by `factor`, in one rounding with the maximum's subtraction.
    factor = scale * LOG2_E
    if SOFT_CAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which does not overflow into NaN.
        score = soft_cap * (1.0 - 2.0 / (tl.exp2(score * (2.0 * LOG2_E / soft_cap * scale)) + 1.0))
        factor = LOG2_E
    if MASKED:
        visible = there[None, :] & (place[None, :] <= position[:, None])
        if WINDOW:
            visible = visible & (place[None, :] > position[:, None] - window)
        score = tl.where(visible, score, float("-inf"))
    higher = tl.maximum(largest, tl.max(score, axis=1) * factor)
    # A row that sees nothing yet keeps minus infinity; zero stands in so that no NaN comes of it.
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    share = tl.exp2(tl.fma(score, factor, -anchor[:, None]))
    shrink = tl.exp2(largest - anchor)
    weight = weight * shrink + tl.sum(share, axis=1)
    if SHARED_VALUE:
        value = key
    else:
        value = _vectors(values, slot * VALUE_DIM, there, 0, VALUE_DIM, VALUE_BLOCK, MASKED).to(DTYPE)
    if SCALED:
        column: tl.constexpr = 0 if SHARED_VALUE else 1
        share *= tl.load(scales + slot * 2 + column, mask=there, other=0.0)[None, :]
    total = tl.dot(share.to(DTYPE), value, total * shrink[:, None], input_precision="ieee")
    return higher, weight, total


@triton.jit
def _attend(
    item,
    q,
    out,
    sums,
    stats,
    keys,
    values,
    scales,
    sinks,
    tables,
    positions,
    part_base,
    rows,
    fields,
    num_items,
    table_stride,
    num_heads,
    num_kv_heads,
    scale,
    soft_cap,
    window,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    MAIN_BLOCK: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    SHARED_VALUE: tl.constexpr,
    SCALED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    FINAL: tl.constexpr,
):
    """One item for GROUP query heads."""
    kv_head = tl.program_id(1) // CHUNKS
    first = tl.load(fields + item)
    count = tl.load(fields + num_items + item)
    sequence = tl.load(fields + 2 * num_items + item)
    begin = tl.load(fields + 3 * num_items + item)
    end = tl.load(fields + 4 * num_items + item)
    part = tl.load(fields + 5 * num_items + item)

    tile = tl.arange(0, TILE)
    present = tile // GROUP < count
    head = tl.program_id(1) * GROUP + tile % GROUP
    token = tl.load(rows + first + tile // GROUP, mask=present, other=0)
    position = tl.load(positions + token, mask=present, other=0)
    row = (token.to(tl.int64) * num_heads + head) * (MAIN + TAIL)
    q_main = _vectors(q, row, present, 0, MAIN, MAIN_BLOCK, True)
    q_tail = q_main
    if TAIL > 0:
        q_tail = _vectors(q, row, present, MAIN, TAIL, TAIL_BLOCK, True)

    largest = tl.full([TILE], float("-inf"), tl.float32)
    weight = tl.zeros([TILE], tl.float32)
    total = tl.zeros([TILE, VALUE_BLOCK], tl.float32)
    table = tables + sequence * table_stride
    middle = begin
    if FINAL and not WINDOW:
        # Most of a prompt's history is seen by every row of a tile. (A part is too short for two loops.)
        lowest = tl.min(tl.where(present, position, 2147483647), axis=0)
        middle = begin + tl.maximum(tl.minimum(lowest + 1, end) - begin, 0) // STEP * STEP
        for start in range(begin, middle, STEP):
            largest, weight, total = _advance(
                start,
                end,
                largest,
                weight,
                total,
                q_main,
                q_tail,
                position,
                table,
                keys,
                values,
                scales,
                kv_head,
                num_kv_heads,
                scale,
                soft_cap,
                window,
                MAIN,
                TAIL,
                VALUE_DIM,
                MAIN_BLOCK,
                TAIL_BLOCK,
                VALUE_BLOCK,
                BLOCK_SIZE,
                STEP,
                SHARED_VALUE,
                SCALED,
                SOFT_CAP,
                WINDOW,
                False,
            )
    for start in range(middle, end, STEP):
        largest, weight, total = _advance(
            start,
            end,
            largest,
            weight,
            total,
            q_main,
            q_tail,
            position,
            table,
            keys,
            values,
            scales,
            kv_head,
            num_kv_heads,
            scale,
            soft_cap,
            window,
            MAIN,
            TAIL,
            VALUE_DIM,
            MAIN_BLOCK,
            TAIL_BLOCK,
            VALUE_BLOCK,
            BLOCK_SIZE,
            STEP,
            SHARED_VALUE,
            SCALED,
            SOFT_CAP,
            WINDOW,
            True,
        )

    place_out = tl.arange(0, VALUE_BLOCK)
    wanted = present[:, None] & (place_out < VALUE_DIM)[None, :]
    if FINAL:
        if SINKS:
            sink = tl.load(sinks + head, mask=present, other=0.0) * LOG2_E
            higher = tl.maximum(largest, sink)
            shrink = tl.exp2(largest - higher)
            weight = weight * shrink + tl.exp2(sink - higher)
            total = total * shrink[:, None]
        result = total / weight[:, None]
        row = (token.to(tl.int64) * num_heads + head) * VALUE_DIM
        tl.store(out + row[:, None] + place_out[None, :], result.to(out.dtype.element_ty), mask=wanted)
    else:
        index = (tl.load(part_base + token, mask=present, other=0) + part).to(tl.int64) * num_heads + head
        tl.store(sums + index[:, None] * VALUE_DIM + place_out[None, :], total, mask=wanted)
        tl.store(stats + index * 2, largest, mask=present)
        tl.store(stats + index * 2 + 1, weight, mask=present)


# Numbers that change from step to step must not decide what is compiled.
@triton.jit(do_not_specialize=["num_items", "table_stride"])
def attention_kernel(
    q,
    out,
    sums,
    stats,
    keys,
    values,
    scales,
    sinks,
    tables,
    positions,
    part_base,
    rows,
    fields,
    num_items,
    num_listed,
    table_stride,
    num_heads,
    num_kv_heads,
    scale,
    soft_cap,
    window,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    MAIN_BLOCK: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    SHARED_VALUE: tl.constexpr,
    SCALED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    FINAL: tl.constexpr,
    LISTED: tl.constexpr,
):
    """One program per item and GROUP query heads of a kv head, of which it has CHUNKS times as many. FINAL
    writes results, else sums and stats (maximum in powers of two, weight) of a part.

    LISTED: num_items is room for so many items, num_listed [1] how many there are, and programs take turns.
    """
    if LISTED:
        for item in range(tl.program_id(0), tl.load(num_listed), tl.num_programs(0)):
            _attend(
                item,
                q,
                out,
                sums,
                stats,
                keys,
                values,
                scales,
                sinks,
                tables,
                positions,
                part_base,
                rows,
                fields,
                num_items,
                table_stride,
                num_heads,
                num_kv_heads,
                scale,
                soft_cap,
                window,
                GROUP,
                CHUNKS,
                MAIN,
                TAIL,
                VALUE_DIM,
                MAIN_BLOCK,
                TAIL_BLOCK,
                VALUE_BLOCK,
                BLOCK_SIZE,
                TILE,
                STEP,
                SHARED_VALUE,
                SCALED,
                SOFT_CAP,
                WINDOW,
                SINKS,
                FINAL,
            )
    else:
        _attend(
            tl.program_id(0),
            q,
            out,
            sums,
            stats,
            keys,
            values,
            scales,
            sinks,
            tables,
            positions,
            part_base,
            rows,
            fields,
            num_items,
            table_stride,
            num_heads,
            num_kv_heads,
            scale,
            soft_cap,
            window,
            GROUP,
            CHUNKS,
            MAIN,
            TAIL,
            VALUE_DIM,
            MAIN_BLOCK,
            TAIL_BLOCK,
            VALUE_BLOCK,
            BLOCK_SIZE,
            TILE,
            STEP,
            SHARED_VALUE,
            SCALED,
            SOFT_CAP,
            WINDOW,
            SINKS,
            FINAL,
        )


@triton.jit
def list_parts_kernel(
    context_lens,
    positions,
    part_count,
    fields,
    num_listed,
    num_rows,
    capacity,
    most,
    window,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One program: the parts of all rows of one token each, as triton_plan cuts them, without gaps."""
    row = tl.arange(0, ROWS)
    there = row < num_rows
    length = tl.load(context_lens + row, mask=there, other=0)
    size = tl.full([ROWS], PART, tl.int32)
    for _ in range(16):
        size = tl.where(size * MOST_PARTS < length, size * 2, size)
    count = (length + size - 1) // size
    ends = tl.cumsum(count, axis=0)
    tl.store(positions + row, length - 1, mask=there)
    tl.store(part_count + row, count, mask=there)
    tl.store(num_listed, tl.sum(count, axis=0))
    reach = tl.zeros([ROWS], tl.int32)
    if WINDOW:
        reach = tl.maximum(length - window, 0)
    for part in range(most):
        listed = there & (part < count)
        first = part * size
        last = tl.minimum(first + size, length)
        at = fields + ends - count + part
        tl.store(at, row, mask=listed)
        tl.store(at + capacity, tl.full([ROWS], 1, tl.int32), mask=listed)
        tl.store(at + 2 * capacity, row, mask=listed)
        tl.store(at + 3 * capacity, tl.minimum(tl.maximum(first, reach), last), mask=listed)
        tl.store(at + 4 * capacity, last, mask=listed)
        tl.store(at + 5 * capacity, tl.zeros([ROWS], tl.int32) + part, mask=listed)


@triton.jit
def merge_kernel(
    sums,
    stats,
    out,
    sinks,
    part_base,
    part_count,
    num_heads,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One program per token and head: its parts, first to last."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    count = tl.load(part_count + token)
    if count == 0:
        return
    base = tl.load(part_base + token).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < VALUE_DIM
    largest = float("-inf")
    weight = 0.0
    if SINKS:
        largest = tl.load(sinks + head).to(tl.float32) * LOG2_E
        weight = 1.0
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(count):
        index = (base + part) * num_heads + head
        here = tl.load(stats + index * 2)
        higher = tl.maximum(largest, here)
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(largest - anchor)
        grow = tl.exp2(here - anchor)
        some = tl.load(sums + index * VALUE_DIM + place, mask=inside, other=0.0)
        total = total * shrink + some * grow
        weight = weight * shrink + tl.load(stats + index * 2 + 1) * grow
        largest = higher
    row = (token.to(tl.int64) * num_heads + head) * VALUE_DIM
    tl.store(out + row + place, (total / weight).to(out.dtype.element_ty), mask=inside)


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


class CapturedPlan:
    """Steps of `rows` rows of one token each; what depends on their contexts is made on the device."""

    def __init__(self, batch: DecodeBatch) -> None:
        self.batch = batch
        self.rows = batch.context_lens.shape[0]
        self.most_parts = most_parts(batch.max_context_len)
        device = batch.context_lens.device
        numbers = torch.arange(self.rows, dtype=torch.int32, device=device)
        self.row_numbers = numbers
        self.part_base = numbers * self.most_parts
        # By window; forgotten at the beginning of each step.
        self.made: dict[int | None, DevicePlan] = {}

    def of(self, window: int | None) -> DevicePlan:
        """The step's work under a window; made when a layer first needs it."""
        if window not in self.made:
            self.made[window] = self._list(window)
        return self.made[window]

    def _list(self, window: int | None) -> DevicePlan:
        device, capacity = self.part_base.device, self.rows * self.most_parts
        positions, part_count = (torch.empty_like(self.part_base) for _ in range(2))
        fields = torch.empty(6, capacity, dtype=torch.int32, device=device)
        num_listed = torch.empty(1, dtype=torch.int32, device=device)
        list_parts_kernel[(1,)](
            self.batch.context_lens,
            positions,
            part_count,
            fields,
            num_listed,
            self.rows,
            capacity,
            self.most_parts,
            window or 0,
            ROWS=max(16, triton.next_power_of_2(self.rows)),
            PART=PART,
            MOST_PARTS=MOST_PARTS,
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


class TritonAttention:
    """The back end of GPUs."""

    name = "triton"
    captures = True

    def __init__(self, *, num_heads: int, num_kv_heads: int) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.group = num_heads // num_kv_heads

    def plan(self, batch: RaggedBatch, device: torch.device) -> dict[int | None, DevicePlan]:
        """Plans by window, made when a layer first needs them: layers with the same window share one."""
        self._batch, self._device = batch, device
        return {}

    def plan_decode(self, batch: DecodeBatch) -> CapturedPlan:
        """See CapturedAttention."""
        return CapturedPlan(batch)

    def begin(self, plan: CapturedPlan) -> None:
        """See CapturedAttention."""
        plan.made.clear()

    def captured_workspace_bytes(self, rows: int, max_context_len: int, head_dim: int) -> int:
        """See CapturedAttention: sums and their two numbers per part and head, and the parts' own fields."""
        parts = rows * most_parts(max_context_len)
        return parts * (self.num_heads * (head_dim + 2) * 4 + 6 * 4)

    def run(
        self,
        plan: dict[int | None, DevicePlan] | CapturedPlan,
        q: Tensor,
        cache: PlainCache | QuantizedCache,
        options: AttentionOptions,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, H, D] (T may be padded) -> [T, H, E]. sinks [H] are extra scores that attend to nothing."""
        if isinstance(plan, CapturedPlan):
            return self._run(plan.of(options.window), q.contiguous(), cache, options, sinks)
        if options.window not in plan:
            plan[options.window] = self._device_plan(options.window, q.shape[2], _kv_of(cache))
        return self._run(plan[options.window], q.contiguous(), cache, options, sinks)

    def _shape(self, key_dim: int, kv: str, device: torch.device, *, final: bool) -> LaunchShape:
        return launch_shape(group=self.group, key_dim=key_dim, final=final, kv=kv, arch=arch_of(device))

    def _device_plan(self, window: int | None, key_dim: int, kv: str) -> DevicePlan:
        split, whole = (self._shape(key_dim, kv, self._device, final=final) for final in (False, True))
        made = make_plan(
            self._batch,
            split_rows=split.tile // split.heads,
            tile_rows=whole.tile // whole.heads,
            window=window,
        )

        there = partial(on_device, device=self._device)

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
        cache: PlainCache | QuantizedCache,
        options: AttentionOptions,
        sinks: Tensor | None,
    ) -> Tensor:
        keys, shared = cache.keys, cache.values is None
        values = keys if cache.values is None else cache.values
        scales = cache.scales if isinstance(cache, QuantizedCache) else None
        key_dim = keys.shape[-1]
        value_dim = cache.shared_value_dim if shared else values.shape[-1]
        # Rows that pad an eager step are nobody's work.
        empty = torch.zeros if plan.num_listed is None else torch.empty
        out = empty(q.shape[0], self.num_heads, value_dim, dtype=q.dtype, device=q.device)
        parts = max(1, plan.num_parts)
        sums = torch.empty(parts, self.num_heads, value_dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(parts, self.num_heads, 2, dtype=torch.float32, device=q.device)
        main = value_dim if shared else key_dim
        tail = key_dim - main
        for work, final in ((plan.split, False), (plan.whole, True)):
            if work is None:
                continue
            rows, fields = work
            num_items = fields.shape[1]
            shape = self._shape(key_dim, _kv_of(cache), q.device, final=final)
            width = self.num_heads // shape.heads
            programs = num_items
            if plan.num_listed is not None:
                programs = min(num_items, -(-_programs_at_once(q.device) // width))
            attention_kernel[(programs, width)](
                q,
                out,
                sums,
                stats,
                keys,
                values,
                scales if scales is not None else stats,
                sinks if sinks is not None else stats,
                plan.tables,
                plan.positions,
                plan.part_base,
                rows,
                fields,
                num_items,
                plan.num_listed if plan.num_listed is not None else fields,
                plan.tables.stride(0),
                self.num_heads,
                self.num_kv_heads,
                options.scale,
                options.soft_cap or 1.0,
                options.window or 0,
                GROUP=shape.heads,
                CHUNKS=self.group // shape.heads,
                MAIN=main,
                TAIL=tail,
                VALUE_DIM=value_dim,
                MAIN_BLOCK=_block(main),
                TAIL_BLOCK=_block(tail),
                VALUE_BLOCK=_block(value_dim),
                BLOCK_SIZE=cache.block_size,
                TILE=shape.tile,
                STEP=shape.step,
                SHARED_VALUE=shared,
                SCALED=scales is not None,
                SOFT_CAP=options.soft_cap is not None,
                WINDOW=options.window is not None,
                SINKS=sinks is not None,
                FINAL=final,
                LISTED=plan.num_listed is not None,
                num_warps=shape.num_warps,
                num_stages=shape.num_stages,
            )
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


@dataclass(frozen=True)
class LaunchShape:
    """What a launch decides besides the model's own sizes."""

    heads: int  # query heads of a tile, which share their keys; a group may need several tiles
    tile: int  # rows: tokens times heads
    step: int  # positions of one pass through the inner loop
    num_warps: int
    num_stages: int


def launch_shape(*, group: int, key_dim: int, final: bool, kv: str, arch: str = "") -> LaunchShape:
    """The shape that was measured for an architecture, or one chosen such that no register spills on sm_80
    and sm_90 (engine/kernels/compile_ahead). `kv` says how the cache is stored: "plain", "int8" or "fp8".
    """
    largest, step, num_warps, num_stages = (
        WHOLE_SHAPES[key_dim > 128] if final else SPLIT_SHAPES[key_dim > 128]
    )
    if final and kv != "plain" and key_dim <= 128:
        largest, step, num_warps, num_stages = QUANTIZED_WHOLE_SHAPE
    elif final and arch == "sm_90" and key_dim <= 128:
        largest, step, num_warps, num_stages = HOPPER_WHOLE_SHAPE
    if key_dim > 256:
        largest, step, num_warps, num_stages = LATENT_SHAPE
    measured = tuned_shape(arch, key_of(final=final, key_dim=key_dim, group=group, kv=kv))
    if measured is not None:
        largest, step, num_warps, num_stages = measured
    heads = next(heads for heads in range(min(group, largest), 0, -1) if group % heads == 0)
    tile = largest if final else max(16, triton.next_power_of_2(heads))
    return LaunchShape(heads=heads, tile=tile, step=step, num_warps=num_warps, num_stages=num_stages)


def _kv_of(cache: PlainCache | QuantizedCache) -> str:
    if not isinstance(cache, QuantizedCache):
        return "plain"
    return "int8" if cache.keys.dtype == torch.int8 else "fp8"


def _programs_at_once(device: torch.device) -> int:
    """Programs that share a list: as many as run at the same time, several on each multiprocessor."""
    if device.type != "cuda":
        return 8
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def _block(size: int) -> int:
    """A tile's width: a power of two, and at least what a matrix unit takes."""
    return max(16, triton.next_power_of_2(size)) if size else 16
