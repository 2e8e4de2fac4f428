"""Queries and keys turned by their positions, and keys and values written to the paged cache, in one launch.

Shape letters: T tokens, H query heads, K kv heads, D key dim, E value dim, R rotated dimensions, N blocks, P
block size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.norm.triton_norm import LIMITS, scaled_row
from kernels.paged_cache.channel_cache import ChannelCache
from kernels.paged_cache.store import PlainCache, QuantizedCache
from kernels.paged_cache.triton_channels import close_blocks, whole_block
from kernels.paged_cache.triton_four_bits import store_four_bits

CACHE_LIMITS = {torch.int8: LIMITS["int8"], torch.float8_e4m3fn: LIMITS["fp8"]}


@triton.jit
def _rotated(row, cos, sin, half, INTERLEAVED: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """One head's vector [BLOCK] in float32, its first 2 * half elements turned."""
    offset = tl.arange(0, BLOCK)
    inside = offset < DIM
    turning = offset < 2 * half
    pair = tl.where(offset < half, offset, offset - half)
    if INTERLEAVED:
        first_at = tl.where(turning, 2 * pair, offset)
        second_at = tl.where(turning, 2 * pair + 1, offset)
    else:
        first_at = tl.where(turning, pair, offset)
        second_at = tl.where(turning, pair + half, offset)
    first = tl.load(row + first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(row + second_at, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + pair, mask=turning, other=1.0)
    s = tl.load(sin + pair, mask=turning, other=0.0)
    upper = offset < half
    rotated = tl.where(upper, first * c - second * s, second * c + first * s)
    return tl.where(turning, rotated, first)


@triton.jit
def _store(values, target, scale_at, inside, LIMIT: tl.constexpr, ROUND: tl.constexpr):
    """Writes one head's vector (zeros outside) to the cache, with its scale where the cache is quantized."""
    if LIMIT > 0:
        values, scale = scaled_row(values, LIMIT, ROUND)
        tl.store(scale_at, scale)
    tl.store(target, values.to(target.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_recent"])
def rope_and_store_kernel(
    q,
    k,
    v,
    q_out,
    cos,
    sin,
    slots,
    keys,
    values,
    scales,
    recent,
    own,
    whole_slots,
    num_recent,
    q_stride,
    k_stride,
    v_stride,
    num_heads,
    num_kv_heads,
    half,
    block_size,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LIMIT: tl.constexpr,
    ROUND: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One program per token and head: query heads first, then key and value heads. WHOLE: keys go to blocks
    of whole ones (StepKeys), from which they are rounded later, and values in four bits.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    offset = tl.arange(0, BLOCK)
    cos += token * half
    sin += token * half
    if head < num_heads:
        row = q + token * q_stride + head * KEY_DIM
        rotated = _rotated(row, cos, sin, half, INTERLEAVED, KEY_DIM, BLOCK)
        target = q_out + (token * num_heads + head) * KEY_DIM + offset
        tl.store(target, rotated.to(q_out.dtype.element_ty), mask=offset < KEY_DIM)
    else:
        head -= num_heads
        slot = tl.load(slots + token)
        at = (slot // block_size * num_kv_heads + head) * block_size + slot % block_size
        rotated = _rotated(k + token * k_stride + head * KEY_DIM, cos, sin, half, INTERLEAVED, KEY_DIM, BLOCK)
        # Keys are rounded to the model's type before they are quantized, as without a fused kernel.
        rotated = rotated.to(k.dtype.element_ty).to(tl.float32)
        if WHOLE:
            place = tl.load(whole_slots + token)
            base = whole_block(
                recent, own, place // block_size, num_recent, num_kv_heads * block_size * KEY_DIM
            )
            target = base + (head * block_size + place % block_size) * KEY_DIM + offset
            tl.store(target, rotated.to(recent.dtype.element_ty), mask=offset < KEY_DIM)
        else:
            _store(rotated, keys + at * KEY_DIM + offset, scales + at * 2, offset < KEY_DIM, LIMIT, ROUND)
        if LIMIT > 0 and VALUE_DIM == 0:
            # The key holds the value: one scale for both.
            tl.store(scales + at * 2 + 1, tl.load(scales + at * 2))
        if VALUE_DIM > 0:
            inside = offset < VALUE_DIM
            row = v + token * v_stride + head * VALUE_DIM
            value = tl.load(row + offset, mask=inside, other=0.0).to(tl.float32)
            if WHOLE:
                packed = values + at * (VALUE_DIM // 2)
                store_four_bits(value, packed, scales + at, VALUE_DIM, VALUE_DIM & -VALUE_DIM)
            else:
                _store(value, values + at * VALUE_DIM + offset, scales + at * 2 + 1, inside, LIMIT, ROUND)


def rope_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    cache: PlainCache | QuantizedCache | ChannelCache,
    *,
    interleaved: bool = False,
) -> Tensor:
    """q [T, H, D], k [T, K, D], v [T, K, E] (views of one product's columns), cos and sin [T, R/2] float32,
    slots [T] -> turned queries [T, H, D]. Keys and values go to `cache`, quantized as it is.
    """
    num_tokens, num_heads, key_dim = q.shape
    num_kv_heads = k.shape[1]
    keys = cache.keys
    values = keys if cache.values is None else cache.values
    scales = cos if isinstance(cache, PlainCache) else cache.scales
    limit = CACHE_LIMITS.get(keys.dtype, 0.0)
    value_dim = v.shape[2] if v is not None else 0
    whole = _whole(cache, slots)
    if isinstance(cache, ChannelCache):
        cache.bring()
    out = torch.empty(num_tokens, num_heads, key_dim, dtype=q.dtype, device=q.device)
    if num_tokens:
        rope_and_store_kernel[(num_tokens, num_heads + num_kv_heads)](
            q,
            k,
            v if v is not None else k,
            out,
            cos,
            sin,
            slots,
            keys,
            values,
            scales,
            *whole,
            q.stride(0),
            k.stride(0),
            v.stride(0) if v is not None else 0,
            num_heads,
            num_kv_heads,
            cos.shape[1],
            cache.block_size,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            BLOCK=triton.next_power_of_2(max(key_dim, value_dim)),
            INTERLEAVED=interleaved,
            LIMIT=limit,
            ROUND=keys.dtype == torch.int8,
            WHOLE=isinstance(cache, ChannelCache),
            num_warps=1 if key_dim <= 128 else 4,
        )
    if isinstance(cache, ChannelCache):
        close_blocks(cache)
    return out


def _whole(cache: PlainCache | QuantizedCache | ChannelCache, slots: Tensor) -> tuple[Any, ...]:
    """Where whole keys go: blocks that steps share and those of this one, slots, and how many there are of
    the first; of other caches anything.
    """
    if not isinstance(cache, ChannelCache):
        return cache.keys, cache.keys, slots, 0
    assert cache.recent is not None, "a step has begun"
    assert cache.step is not None, "with room for its keys"
    own = cache.recent if cache.own is None else cache.own
    return cache.recent, own, cache.step.slots, cache.recent.shape[0]
