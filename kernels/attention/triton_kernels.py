"""The attention kernels, in Triton: see triton_attention for what they compute, and who launches them.

Shape letters: E value dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.triton_plan import MOST_PARTS, PART
from kernels.paged_cache.triton_channels import whole_block
from kernels.paged_cache.triton_four_bits import levels_of

LOG2_E = tl.constexpr(1.4426950408889634)
_PART, _MOST_PARTS = tl.constexpr(PART), tl.constexpr(MOST_PARTS)


@triton.jit
def _vectors(
    base, at, there, FIRST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """Elements [FIRST, FIRST + SIZE) of the vectors that begin at base + at [rows], as [rows, BLOCK]; zeros
    beyond SIZE, and where MASKED also in rows that are not `there`.
    """
    offset = tl.arange(0, BLOCK)
    entries = base + at[:, None] + (FIRST + offset)[None, :]
    if SIZE == BLOCK:
        if MASKED:
            loaded = tl.load(entries, mask=there[:, None], other=0.0)
        else:
            loaded = tl.load(entries)
    elif MASKED:
        loaded = tl.load(entries, mask=there[:, None] & (offset < SIZE)[None, :], other=0.0)
    else:
        loaded = tl.load(entries, mask=(offset < SIZE)[None, :], other=0.0)
    return loaded


@triton.jit
def _fetched(
    source,
    first,
    slot,
    there,
    DIM: tl.constexpr,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BULK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Elements [FIRST, FIRST + SIZE) of the vectors of DIM at slots, the first of which is `first` where they
    are copied in BULK. Bytes without signs hold two of four bits each.
    """
    if BULK:
        found = source.load([first, FIRST])
    elif source.dtype.element_ty == tl.uint8:
        found = levels_of(source, slot.to(tl.int64) * (DIM // 2), there, SIZE, BLOCK, MASKED)
    else:
        found = _vectors(source, slot.to(tl.int64) * DIM, there, FIRST, SIZE, BLOCK, MASKED)
    return found


@triton.jit
def _by_channel(levels, channels, block, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Keys [rows, BLOCK] of a block, whose channels have a middle and half a step of their own."""
    offset = tl.arange(0, BLOCK)
    at = channels + block.to(tl.int64) * (2 * SIZE) + offset
    middle = tl.load(at, mask=offset < SIZE, other=0.0).to(tl.float32)
    half = tl.load(at + SIZE, mask=offset < SIZE, other=0.0).to(tl.float32)
    return levels.to(tl.float32) * half[None, :] + middle[None, :]


@triton.jit
def _slots(
    table,
    start,
    offset,
    there,
    kv_head,
    num_kv_heads,
    BLOCK_SIZE: tl.constexpr,
    STEP: tl.constexpr,
    WITHIN: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Slots of the cache for `offset`, positions [start, start + STEP), and the first of them. WITHIN:
    they lie in one block, so that one number says where they begin; `first` means nothing without it.
    """
    first = start
    if WITHIN:
        block = tl.load(table + start // BLOCK_SIZE)
        first = (block * num_kv_heads + kv_head) * BLOCK_SIZE + start % BLOCK_SIZE
        slot = first + tl.arange(0, STEP)
    else:
        if MASKED:
            block = tl.load(table + offset // BLOCK_SIZE, mask=there, other=0)
        else:
            block = tl.load(table + offset // BLOCK_SIZE)
        slot = (block * num_kv_heads + kv_head) * BLOCK_SIZE + offset % BLOCK_SIZE
    return slot, first


@triton.jit
def _capped(score, scale, soft_cap, SOFT_CAP: tl.constexpr):
    """Scores, and what they are multiplied by to be exp2's argument, in one rounding with the maximum's
    subtraction.
    """
    factor = scale * LOG2_E
    if SOFT_CAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which does not overflow into NaN.
        score = soft_cap * (1.0 - 2.0 / (tl.exp2(score * (2.0 * LOG2_E / soft_cap * scale)) + 1.0))
        factor = LOG2_E
    return score, factor


@triton.jit
def _visible(offset, there, position, window, WINDOW: tl.constexpr, ALONE: tl.constexpr):
    """Which positions each row of a tile sees. The only token of a tile sees all that lies between its begin
    and end.
    """
    visible = there[None, :]
    if not ALONE:
        visible = visible & (offset[None, :] <= position[:, None])
        if WINDOW:
            visible = visible & (offset[None, :] > position[:, None] - window)
    return visible


@triton.jit
def _add_scaled(total, share, scale, value):
    """A total and the values [STEP, E], each times its share [rows, STEP] and its scale [STEP]."""
    if tl.float16 == value.dtype:
        # Shares of small values would be below what float16 holds.
        most = tl.maximum(tl.max(scale, axis=0), 1e-30)
        share *= (scale / most)[None, :]
        return tl.dot(share.to(value.dtype), value, input_precision="ieee") * most + total
    share *= scale[None, :]
    return tl.dot(share.to(value.dtype), value, total, input_precision="ieee")


@triton.jit
def _advance(
    start,
    begin,
    end,
    largest,
    weight,
    total,
    query,
    history,
    how,
    SIZES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STEP: tl.constexpr,
    SHARED_VALUE: tl.constexpr,
    SCALES: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    BULK: tl.constexpr,
    ALONE: tl.constexpr,
    MASKED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Takes positions [start, start + STEP) in, of which those before `begin` and from `end` on may hold
    anything. Unless MASKED, every row sees all of them; the arithmetic is the same, so that no bit depends on
    which it was. WHOLE: they lie in the rows' own block, whose keys are whole.
    """
    MAIN: tl.constexpr = SIZES[0]
    TAIL: tl.constexpr = SIZES[1]
    VALUE_DIM: tl.constexpr = SIZES[2]
    q_main, q_tail, position = query
    table, keys, tails, values, scales, channels, whole, kv_head, num_kv_heads = history
    scale, soft_cap, window = how
    BY_CHANNEL: tl.constexpr = SCALES == 1
    DTYPE: tl.constexpr = q_main.dtype
    KEY_DIM: tl.constexpr = MAIN + TAIL
    offset = start + tl.arange(0, STEP)
    there = offset < end
    if WINDOW:
        there = there & (offset >= begin)
    # Latent keys leave no registers for it.
    WITHIN: tl.constexpr = BLOCK_SIZE % STEP == 0 and (BULK or BY_CHANNEL or MAIN <= 256)
    slot, first = _slots(table, start, offset, there, kv_head, num_kv_heads, BLOCK_SIZE, STEP, WITHIN, MASKED)
    if WHOLE:
        key = _vectors(whole, offset % BLOCK_SIZE * KEY_DIM, there, 0, MAIN, SIZES[3], MASKED).to(DTYPE)
    else:
        key = _fetched(keys, first, slot, there, KEY_DIM, 0, MAIN, SIZES[3], BULK, MASKED)
        if BY_CHANNEL:
            key = _by_channel(key, channels, first // BLOCK_SIZE, MAIN, SIZES[3])
        key = key.to(DTYPE)
    score = tl.dot(q_main, tl.trans(key), input_precision="ieee")
    if TAIL > 0:
        tail = _fetched(tails, first, slot, there, KEY_DIM, MAIN, TAIL, SIZES[4], BULK, MASKED).to(DTYPE)
        score = tl.dot(q_tail, tl.trans(tail), score, input_precision="ieee")
    if SCALES == 2:
        score *= tl.load(scales + slot.to(tl.int64) * 2, mask=there, other=0.0)[None, :]
    score, factor = _capped(score, scale, soft_cap, SOFT_CAP)
    if MASKED:
        visible = _visible(offset, there, position, window, WINDOW, ALONE)
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
        value = _fetched(values, first, slot, there, VALUE_DIM, 0, VALUE_DIM, SIZES[5], BULK, MASKED).to(
            DTYPE
        )
    if BULK and MASKED:
        value = tl.where(there[:, None], value, 0.0)
    total *= shrink[:, None]
    if SCALES:
        part = scales + slot.to(tl.int64) * SCALES + (0 if SHARED_VALUE else SCALES - 1)
        total = _add_scaled(total, share, tl.load(part, mask=there, other=0.0), value)
    else:
        total = tl.dot(share.to(DTYPE), value, total, input_precision="ieee")
    return higher, weight, total


@triton.jit
def _rows_of(rows, field, num_items, GROUP: tl.constexpr, TILE: tl.constexpr, AGAIN: tl.constexpr):
    """Of an item's tile: tokens (one number where the tile has but one) and heads, and which there are. AGAIN
    reads them anew: where results are stored need not lie in registers while they are computed.
    """
    tile = tl.arange(0, TILE)
    first = tl.load(field, volatile=AGAIN)
    if TILE == GROUP:
        present = tile < TILE
        token = tl.load(rows + first)
    else:
        present = tile // GROUP < tl.load(field + num_items, volatile=AGAIN)
        token = tl.load(rows + first + tile // GROUP, mask=present, other=0)
    return token, tl.program_id(1) * GROUP + tile % GROUP, present


@triton.jit
def _of_tokens(numbers, token, present, GROUP: tl.constexpr):
    """What `numbers` holds for each token of a tile."""
    if present.shape[0] == GROUP:
        found = tl.load(numbers + token)
    else:
        found = tl.load(numbers + token, mask=present, other=0)
    return found


@triton.jit
def _as_half(vectors):
    """As float16, which holds every number of fp8: a device makes it of fp8 in one instruction, and
    bfloat16 in two, of which one has a sixteenth of the rate.
    """
    return tl.clamp(vectors.to(tl.float32), -65504.0, 65504.0).to(tl.float16)


@triton.jit
def _queries(
    q,
    positions,
    token,
    head,
    present,
    num_heads,
    GROUP: tl.constexpr,
    SIZES: tl.constexpr,
    HALF: tl.constexpr,
):
    """Of a tile's rows: main part and tail of each vector, and its position."""
    position = tl.zeros_like(head) + _of_tokens(positions, token, present, GROUP)
    row = (token.to(tl.int64) * num_heads + head) * (SIZES[0] + SIZES[1])
    q_main = _vectors(q, row, present, 0, SIZES[0], SIZES[3], True)
    q_tail = q_main
    if SIZES[1] > 0:
        q_tail = _vectors(q, row, present, SIZES[0], SIZES[1], SIZES[4], True)
    if HALF:
        q_main, q_tail = _as_half(q_main), _as_half(q_tail)
    return q_main, q_tail, position


@triton.jit
def _attend(
    begin,
    end,
    present,
    query,
    history,
    how,
    SIZES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STEP: tl.constexpr,
    SHARED_VALUE: tl.constexpr,
    SCALES: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    BULK: tl.constexpr,
    ALONE: tl.constexpr,
    FINAL: tl.constexpr,
):
    """Of positions [begin, end): maximum in powers of two, weight and unnormalized sum of each row."""
    TILE: tl.constexpr = present.shape[0]
    BY_CHANNEL: tl.constexpr = SCALES == 1
    largest = tl.full([TILE], float("-inf"), tl.float32)
    weight = tl.zeros([TILE], tl.float32)
    # Triton 3.6 takes no element of a tuple for a shape, only a constant by its name.
    WIDTH: tl.constexpr = SIZES[5]
    total = tl.zeros([TILE, WIDTH], tl.float32)
    # Steps begin at multiples of STEP, whatever a window leaves out: a row's sum does not depend on the rows
    # beside it. Of the three loops, the first meets where windows begin, the last where rows end.
    low = begin
    if WINDOW:
        low = begin // STEP * STEP
    high = low
    start = low
    # A part is too short for several loops, but for one over rows' own block, where keys are by channel. The
    # rows of an item have the same one, or theirs lie behind it.
    if FINAL or BY_CHANNEL:
        position = tl.min(tl.where(present, query[2], 2147483647), axis=0)
        if BY_CHANNEL:
            high = tl.maximum(tl.minimum(position // BLOCK_SIZE * BLOCK_SIZE, end), low)
        else:
            high = tl.maximum((tl.minimum(position + 1, end) // STEP) * STEP, low)
        if not FINAL:
            low = high
        elif WINDOW:
            highest = tl.max(tl.where(present, query[2], 0), axis=0)
            low = tl.minimum(tl.maximum(tl.cdiv(highest - how[2] + 1, STEP) * STEP, low), high)
    FIRST: tl.constexpr = (0 if WINDOW else 1) if FINAL else (0 if BY_CHANNEL else 2)
    for LOOP in tl.static_range(FIRST, 3, 1 if FINAL else 2):
        lower = start if LOOP == 0 else (low if LOOP == 1 else high)
        upper = low if LOOP == 0 else (high if LOOP == 1 else end)
        for at in range(lower, upper, STEP):
            largest, weight, total = _advance(
                at,
                begin,
                end,
                largest,
                weight,
                total,
                query,
                history,
                how,
                SIZES,
                BLOCK_SIZE,
                STEP,
                SHARED_VALUE,
                SCALES,
                SOFT_CAP,
                WINDOW,
                BULK,
                ALONE,
                LOOP != 1,
                BY_CHANNEL and LOOP == 2,
            )
    return largest, weight, total


@triton.jit
def _store_result(
    out, sinks, largest, weight, total, at, head, present, SIZES: tl.constexpr, SINKS: tl.constexpr
):
    """Writes the weighted mean, the sinks' weight included, at rows `at` of out."""
    offset = tl.arange(0, SIZES[5])
    if SINKS:
        sink = tl.load(sinks + head, mask=present, other=0.0) * LOG2_E
        higher = tl.maximum(largest, sink)
        shrink = tl.exp2(largest - higher)
        weight = weight * shrink + tl.exp2(sink - higher)
        total = total * shrink[:, None]
    result = (total / weight[:, None]).to(out.dtype.element_ty)
    wanted = present[:, None] & (offset < SIZES[2])[None, :]
    tl.store(out + (at * SIZES[2])[:, None] + offset[None, :], result, mask=wanted)


@triton.jit
def _store_part(sums, stats, largest, weight, total, at, present, SIZES: tl.constexpr):
    """Writes what merging takes, at rows `at` of sums and stats."""
    offset = tl.arange(0, SIZES[5])
    wanted = present[:, None] & (offset < SIZES[2])[None, :]
    tl.store(sums + at[:, None] * SIZES[2] + offset[None, :], total, mask=wanted)
    tl.store(stats + at * 2, largest, mask=present)
    tl.store(stats + at * 2 + 1, weight, mask=present)


@triton.jit
def _own_block(keys, whole_keys, sequence, kv_head, num_kv_heads, SIZE: tl.constexpr, SCALES: tl.constexpr):
    """Where the whole keys of a sequence's own block begin, SIZE elements of each head, where keys are by
    channel; `whole_keys` are channels, blocks that steps share and those of this one, the block of each
    sequence, and how many there are of the first.
    """
    found = keys
    if SCALES == 1:
        row = tl.load(whole_keys[3] + sequence)
        found = whole_block(whole_keys[1], whole_keys[2], row, whole_keys[4], num_kv_heads * SIZE)
        found += kv_head * SIZE
    return found


# Numbers that change from step to step must not decide what is compiled.
@triton.jit(do_not_specialize=["num_items", "table_stride"])
def attention_kernel(
    q,
    out,
    sums,
    stats,
    keys,
    tails,
    values,
    scales,
    whole_keys,
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
    how,
    SIZES: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    SHARED_VALUE: tl.constexpr,
    SCALES: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    BULK: tl.constexpr,
    FINAL: tl.constexpr,
    LISTED: tl.constexpr,
    HALF: tl.constexpr,
):
    """One program per item and GROUP query heads of a kv head, of which it has CHUNKS times as many. FINAL
    writes results, else sums and stats (maximum in powers of two, weight) of a part. SIZES: main part and
    tail of a key, value, and the widths of their tiles. LISTED: num_items is room for so many items,
    num_listed [1] how many there are, and programs take turns. HALF: products are of
    float16, whatever the queries are. SCALES: how many a slot has; one where keys are by channel.
    """
    begin, end, stride = 0, 1, 1
    if LISTED:
        begin, end, stride = tl.program_id(0), tl.load(num_listed), tl.num_programs(0)
    # Nothing is hoisted out of the loop, because its values would take registers from it.
    for turn in tl.range(begin, end, stride, disable_licm=True):
        field = fields + (turn if LISTED else tl.program_id(0))
        sequence = tl.load(field + 2 * num_items)
        token, head, present = _rows_of(rows, field, num_items, GROUP, TILE, False)
        table, kv_head = tables + sequence * table_stride, tl.program_id(1) // CHUNKS
        whole = _own_block(keys, whole_keys, sequence, kv_head, num_kv_heads, SIZES[0] * BLOCK_SIZE, SCALES)
        largest, weight, total = _attend(
            tl.load(field + 3 * num_items),
            tl.load(field + 4 * num_items),
            present,
            _queries(q, positions, token, head, present, num_heads, GROUP, SIZES, HALF),
            (table, keys, tails, values, scales, whole_keys[0], whole, kv_head, num_kv_heads),
            how,
            SIZES,
            BLOCK_SIZE,
            STEP,
            SHARED_VALUE,
            SCALES,
            SOFT_CAP,
            WINDOW,
            BULK,
            TILE == GROUP,
            FINAL,
        )
        token, head, present = _rows_of(rows, field, num_items, GROUP, TILE, True)
        if FINAL:
            at = token.to(tl.int64) * num_heads + head
            _store_result(out, sinks, largest, weight, total, at, head, present, SIZES, SINKS)
        else:
            number = _of_tokens(part_base, token, present, GROUP) + tl.load(field + 5 * num_items)
            at = number.to(tl.int64) * num_heads + head
            _store_part(sums, stats, largest, weight, total, at, present, SIZES)


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
    WINDOW: tl.constexpr,
):
    """One program: the parts of all rows of one token each, as triton_plan cuts them, without gaps."""
    row = tl.arange(0, ROWS)
    there = row < num_rows
    length = tl.load(context_lens + row, mask=there, other=0)
    size = tl.full([ROWS], _PART, tl.int32)
    for _ in range(16):
        size = tl.where(size * _MOST_PARTS < length, size * 2, size)
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
    offset = tl.arange(0, BLOCK)
    inside = offset < VALUE_DIM
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
        some = tl.load(sums + index * VALUE_DIM + offset, mask=inside, other=0.0)
        total = total * shrink + some * grow
        weight = weight * shrink + tl.load(stats + index * 2 + 1) * grow
        largest = higher
    row = (token.to(tl.int64) * num_heads + head) * VALUE_DIM
    tl.store(out + row + offset, (total / weight).to(out.dtype.element_ty), mask=inside)
