"""Attention in Triton against the reference on the CPU, over odd sizes and NaN-poisoned memory: interpreted
here, and on a GPU by tests/gpu.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from kernels.attention.backends import CapturedAttention
from kernels.attention.ragged import DecodeBatch
from kernels.attention.triton_attention import TritonAttention
from kernels.paged_cache.channel_cache import ChannelCache, captured_keys, share_step
from tests.kernels.attention import OPTIONS, SHAPES, assert_bits_alone, compare, draw
from tests.kernels.places import INTERPRETED

HEADS = [(4, 2, 16), (6, 2, 20 if INTERPRETED else 24)]
# What real models have is for a GPU.
LARGE = [(32, 8, 128), (16, 8, 256), (64, 8, 64)]
WIDE, LAST = (HEADS[0], HEADS[1]) if INTERPRETED else (LARGE[0], LARGE[-1])
LARGE_SHAPES = [([5000, 33], [700, 33]), ([20_000, 4097, 1], [1, 1, 1]), ([900] * 40, [1] * 40)]
# The interpreter is slow.
SHORT_SHAPES = [
    *SHAPES[:2],
    ([600], [1]),
    SHAPES[3],
    ([300, 5, 129, 400], [200, 5, 1, 65]),
    ([40, 41, 300], [3, 9, 64]),
]
GPU_SHAPES = [*SHAPES, *LARGE_SHAPES]
TOLERANCE = 2e-5 if INTERPRETED else 1e-4
# Shares of the values are rounded to the queries' type.
HALF_TOLERANCE = 2e-2 if INTERPRETED else 3e-2
check = partial(compare, TritonAttention, rtol=1e-4)
check_half = partial(compare, TritonAttention, tolerance=HALF_TOLERANCE, rtol=HALF_TOLERANCE)


@pytest.mark.parametrize(("lengths", "new"), SHORT_SHAPES if INTERPRETED else GPU_SHAPES)
@pytest.mark.parametrize("heads", [*HEADS, *([(5, 1, 8)] if INTERPRETED else [])])
def test_ragged_batches(
    device: torch.device, lengths: list[int], new: list[int], heads: tuple[int, int, int]
) -> None:
    check(draw(lengths, new, heads), TOLERANCE, device=device)


@pytest.mark.parametrize("heads", HEADS if INTERPRETED else LARGE[1:])
@pytest.mark.parametrize(("lengths", "new"), SHAPES[3:4] if INTERPRETED else GPU_SHAPES[3:])
def test_half_precision_over_other_heads(
    device: torch.device, lengths: list[int], new: list[int], heads: tuple[int, int, int]
) -> None:
    check_half(draw(lengths, new, heads, dtype=torch.bfloat16, q_dtype=torch.bfloat16), device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, "kivi4"])
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, *([torch.float16] if INTERPRETED else [])])
@pytest.mark.parametrize(("lengths", "new"), [([300, 40], [1, 40])] if INTERPRETED else GPU_SHAPES)
def test_queries_of_two_bytes(
    device: torch.device, lengths: list[int], new: list[int], q_dtype: torch.dtype, dtype: Any
) -> None:
    check_half(draw(lengths, new, WIDE, dtype=dtype, q_dtype=q_dtype), device=device)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU, queries are narrower")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, "kivi4"])
@pytest.mark.parametrize("dim", [16, 24])
def test_caches_of_other_types(device: torch.device, dtype: Any, dim: int) -> None:
    check(draw([300, 20], [1, 20], (4, 2, dim), dtype=dtype), TOLERANCE, device=device)


# Chunks that begin and end within blocks, decode rows at both ends of one, drafts over such an end.
BY_CHANNEL_SHAPES = [([130, 5, 70, 300], [100, 5, 1, 199]), ([129, 128, 40, 66], [1, 1, 3, 4])]


@pytest.mark.parametrize(("lengths", "new"), BY_CHANNEL_SHAPES if INTERPRETED else GPU_SHAPES)
@pytest.mark.parametrize("heads", [(4, 2, 16), (5, 1, 48)] if INTERPRETED else LARGE)
@pytest.mark.parametrize("options", OPTIONS)
def test_keys_by_channel(
    device: torch.device, lengths: list[int], new: list[int], heads: tuple[int, int, int], options: str
) -> None:
    check(draw(lengths, new, heads, dtype="kivi4", **OPTIONS[options]), TOLERANCE, device=device)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_prompts_over_blocks_that_are_copied_whole(
    device: torch.device, dtype: torch.dtype, window: int | None
) -> None:
    """By Hopper's copy engine, where there is one: what lies behind a history in its last block is NaN."""
    lengths, new = [300, 129, 257, 5], [200, 129, 65, 1]
    types = {"dtype": dtype, "q_dtype": torch.bfloat16, "block_size": 64}
    step = draw(lengths, new, WIDE, window=window, scale=0.1, **types)  # type: ignore[arg-type]
    arch = "sm_90" if INTERPRETED else ""
    compare(partial(TritonAttention, arch=arch), step, HALF_TOLERANCE, HALF_TOLERANCE, device=device)


@pytest.mark.parametrize(
    ("dim", "q_dtype", "dtype"),
    [
        *[(dim, torch.float32, dtype) for dim in (20, 48) for dtype in (torch.float32, torch.int8)],
        (48, torch.bfloat16, torch.bfloat16),
        (48, torch.bfloat16, torch.int8),
    ]
    if INTERPRETED
    else [(576, torch.bfloat16, torch.bfloat16), (576, torch.bfloat16, torch.int8)],
)
def test_values_inside_keys(device: torch.device, dim: int, q_dtype: torch.dtype, dtype: torch.dtype) -> None:
    heads = (16 if INTERPRETED else 128, 1, dim)
    step = draw([270, 33], [1, 33], heads, value_dim=0, dtype=dtype, q_dtype=q_dtype, scale=0.05)
    # DeepSeek's: all but 64 of a key are its value.
    step.cache.shared_value_dim = dim - min(64, dim // 2)  # type: ignore[attr-defined]
    if q_dtype == torch.float32:
        check(step, TOLERANCE, device=device)
    else:
        check_half(step, device=device)


@pytest.mark.parametrize("window", [1, 17, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_soft_caps_and_sinks(device: torch.device, window: int, dtype: torch.dtype) -> None:
    """A chunk, decoding, a whole prompt, and drafts."""
    heads, options = (LAST if dtype == torch.bfloat16 else HEADS[0]), {"window": window, "soft_cap": 2.0}
    step = draw(
        [530, 600, 40, 300],
        [150, 1, 40, 3],
        heads,
        dtype=dtype,
        q_dtype=dtype,
        with_sinks=True,
        scale=0.3,
        **options,
    )
    if dtype == torch.float32:
        check(step, TOLERANCE, device=device)
    else:
        check_half(step, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "kivi4"])
def test_neither_company_nor_a_shared_prefix_changes_a_bit(device: torch.device, dtype: Any) -> None:
    q_dtype = torch.float32 if dtype == "kivi4" else dtype
    step = draw([600, 580, 700, 333, 64], [1] * 5, LAST, dtype=dtype, q_dtype=q_dtype)
    step.tables[1:3, : 512 // step.block_size] = step.tables[0, : 512 // step.block_size]
    there = step.to(device)
    assert_bits_alone(TritonAttention, there, there.run(TritonAttention))


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    "dtype", ["kivi4", *([torch.float32, torch.int8] if INTERPRETED else [torch.bfloat16])]
)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_captured_steps_give_the_bits_of_eager_ones(
    device: torch.device, window: int | None, dtype: Any, with_sinks: bool
) -> None:
    """From buffers that stay in place, by work that the device lists."""
    attention = TritonAttention(num_heads=LAST[0], num_kv_heads=LAST[1])
    assert isinstance(attention, CapturedAttention)
    q_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    types = {"dtype": dtype, "q_dtype": q_dtype, "with_sinks": with_sinks}
    drawn = draw([700, 699, 300, 257, 64, 513], [1] * 6, LAST, window=window, **types)  # type: ignore[arg-type]
    given = drawn.to(device)
    size = given.block_size
    batch = DecodeBatch(
        context_lens=torch.ones(6, dtype=torch.int32, device=device),
        block_tables=torch.zeros(6, -(-700 // size), dtype=torch.int32, device=device),
        block_size=size,
        max_context_len=700,
    )
    recent_rows = torch.tensor([2 * row + row % 2 for row in range(6)], device=device)
    plan, q = attention.plan_decode(batch), torch.zeros_like(given.q)

    def step() -> torch.Tensor:
        attention.begin(plan)
        if isinstance(given.cache, ChannelCache):
            positions = batch.context_lens.long() - 1
            sizes = {"block_size": size, "num_blocks": len(given.cache.keys)}
            share_step([given.cache], captured_keys(recent_rows, positions, positions * 0, **sizes))
        return attention.run(plan, q, given.cache, given.options, given.sinks)

    replay, out = captured(step, device)
    for lengths in ([1, 699, 256, 257, 17, 513], [700, 3, 300, 40, 41, 1]):
        now = replace(given, lengths=lengths, q=given.q.roll(lengths[0], 0))
        batch.context_lens.copy_(torch.tensor(lengths))
        # What lies beyond a context names no block at all.
        batch.block_tables.fill_(1 << 30)
        for row, length in enumerate(lengths):
            used = -(-length // size)
            batch.block_tables[row, :used] = torch.from_numpy(given.tables[row, :used]).int()
        q.copy_(now.q)
        # Keys of the step are written before, by its eager run.
        eager = now.run(TritonAttention)
        replay()
        assert torch.equal(out[0], eager)


def captured(
    step: Callable[[], torch.Tensor], device: torch.device
) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """A function that replays `step`, and a list whose entry is its result."""
    out = [step()]

    def again() -> None:
        out[0] = step()

    if INTERPRETED:
        return again, out
    again()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again()
    return graph.replay, out
