"""Keys by channel (key_groups) for the kernels in Triton: blocks of whole keys, and their rounding.

Shape letters: F blocks that are full, K kv heads, P block size, D elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.paged_cache.channel_cache import ChannelCache
from kernels.paged_cache.triton_four_bits import packed_codes


@triton.jit
def whole_block(recent, own, row, num_recent, block_elements):
    """Where a block of whole keys begins, by its number (StepKeys)."""
    if row < num_recent:
        found = recent + row * block_elements
    else:
        found = own + (row - num_recent) * block_elements
    return found


@triton.jit(do_not_specialize=["num_full", "num_recent", "nothing"])
def close_blocks_kernel(
    recent,
    own,
    full,
    keys,
    channels,
    num_full,
    num_recent,
    nothing,
    PLACES: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (f, k): head k of the whole block full[0, f] to the block full[1, f] of the cache, unless that
    is `nothing`.
    """
    block = tl.load(full + num_full + tl.program_id(0))
    if block == nothing:
        return
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    base = whole_block(recent, own, tl.load(full + tl.program_id(0)), num_recent, num_heads * PLACES * DIM)
    place, offset = tl.arange(0, PLACES), tl.arange(0, BLOCK)
    inside = offset < DIM
    at = base + head * PLACES * DIM + (place * DIM)[:, None] + offset[None, :]
    wide = tl.load(at, mask=inside[None, :], other=0.0).to(tl.float32)
    least, most = tl.min(wide, axis=0), tl.max(wide, axis=0)
    # The sum of the halves, as the whole may be too large. Codes are made with what is stored.
    middle = (least * 0.5 + most * 0.5).to(tl.bfloat16)
    centre = middle.to(tl.float32)
    widest = tl.div_rn(tl.maximum(most - centre, centre - least), 15.0)
    half = (widest + tl.sum(wide * 0.0, axis=0)).to(tl.bfloat16)  # Maxima drop NaN, sums do not.
    kept = half.to(tl.float32)
    steps = tl.where((kept > 0) & (kept < float("inf")), kept, 1.0)
    codes = packed_codes(tl.div_rn(wide - centre[None, :], tl.broadcast_to(steps[None, :], (PLACES, BLOCK))))
    unit, byte = block * num_heads + head, tl.arange(0, BLOCK // 2)
    channel = channels + unit * (2 * DIM) + offset
    tl.store(channel, middle, mask=inside)
    tl.store(channel + DIM, half, mask=inside)
    target = keys + (unit * PLACES + place)[:, None] * (DIM // 2) + byte[None, :]
    tl.store(target, codes, mask=(byte < DIM // 2)[None, :])


def close_blocks(cache: ChannelCache) -> None:
    """Rounds the blocks that are full with the cache's step."""
    recent, step = cache.recent, cache.step
    assert recent is not None, "a step has begun"
    assert step is not None, "with room for its keys"
    num_full, (num_heads, places, dim) = step.full.shape[1], recent.shape[1:]
    if num_full:
        close_blocks_kernel[(num_full, num_heads)](
            recent,
            recent if cache.own is None else cache.own,
            step.full,
            cache.keys,
            cache.channels,
            num_full,
            recent.shape[0],
            cache.keys.shape[0] - 1,
            PLACES=places,
            DIM=dim,
            BLOCK=triton.next_power_of_2(dim),
            num_warps=4 if dim <= 128 else 8,
        )
