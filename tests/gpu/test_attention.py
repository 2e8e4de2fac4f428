"""Paged attention on the device against the formula on the CPU: odd sizes, NaN wherever nobody may look."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from kernels.attention import AttentionOptions, DecodeBatch, RaggedBatch
from kernels.attention.reference import ReferenceAttention
from kernels.attention.triton_attention import TritonAttention
from kernels.paged_cache import LayerCache
from tests.gpu.conftest import REHEARSES
from tests.kernels.test_attention import CPU, filled_cache, step_of

SHAPES = [
    ([1], [1]),
    ([63, 1000], [63, 1]),
    ([257, 256, 255, 16, 17], [1, 1, 1, 1, 1]),
    ([300, 5, 129, 400], [200, 5, 1, 65]),
    *([] if REHEARSES else [([5000, 33], [700, 33]), ([20_000, 4097, 1], [1, 1, 1]), ([900] * 40, [1] * 40)]),
]
HEADS = [(4, 2, 16), (6, 2, 24), *([] if REHEARSES else [(32, 8, 128), (16, 8, 256), (64, 8, 64)])]
CACHES = {
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


def moved(cache: LayerCache, device: torch.device) -> LayerCache:
    """The same cache on another device."""
    there = copy.copy(cache)
    for name in ("keys", "values", "scales"):
        tensor = getattr(cache, name, None)
        if tensor is not None:
            setattr(there, name, tensor.to(device))
    return there


def compare(
    device: torch.device,
    lengths: list[int],
    new: list[int],
    heads: tuple[int, int, int],
    *,
    dtype: torch.dtype = torch.float32,
    queries: torch.dtype = torch.float32,
    value_dim: int | None = None,
    options: AttentionOptions | None = None,
    with_sinks: bool = False,
    tolerance: float = 1e-4,
    block_size: int = 16,
    arch: str = "",
) -> None:
    num_heads, num_kv_heads, dim = heads
    cache, tables, generator = filled_cache(
        lengths,
        num_heads=num_kv_heads,
        key_dim=dim,
        value_dim=dim if value_dim is None else value_dim,
        dtype=dtype,
        block_size=block_size,
    )
    if value_dim == 0:
        # DeepSeek's: all but 64 of a key are its value.
        cache.shared_value_dim = dim - min(64, dim // 2)
    batch = step_of(lengths, new, tables, block_size)
    q = torch.randn(sum(new), num_heads, dim, generator=generator).to(queries)
    sinks = torch.randn(num_heads, generator=generator) if with_sinks else None
    options = options or AttentionOptions(scale=dim**-0.5)
    reference = ReferenceAttention(num_heads=num_heads, num_kv_heads=num_kv_heads)
    expected = reference.run(reference.plan(batch, CPU), q, cache, options, sinks)
    found = run_on(device, batch, q, moved(cache, device), options, sinks, heads, arch)
    torch.testing.assert_close(found.cpu().float(), expected.float(), atol=tolerance, rtol=tolerance)


def run_on(
    device: torch.device,
    batch: RaggedBatch,
    q: torch.Tensor,
    cache: LayerCache,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
    heads: tuple[int, int, int],
    arch: str = "",
) -> torch.Tensor:
    backend = TritonAttention(num_heads=heads[0], num_kv_heads=heads[1], arch=arch)
    plan = backend.plan(batch, device)
    return backend.run(plan, q.to(device), cache, options, None if sinks is None else sinks.to(device))


@pytest.mark.parametrize(("lengths", "new"), SHAPES)
@pytest.mark.parametrize("heads", HEADS[:2])
def test_float32_equals_the_formula(
    device: torch.device, lengths: list[int], new: list[int], heads: tuple[int, int, int]
) -> None:
    compare(device, lengths, new, heads)


@pytest.mark.parametrize("heads", HEADS[-2:])
@pytest.mark.parametrize(("lengths", "new"), SHAPES[2:])
def test_half_precision_over_other_heads(
    device: torch.device, half: torch.dtype, lengths: list[int], new: list[int], heads: tuple[int, int, int]
) -> None:
    compare(device, lengths, new, heads, dtype=torch.bfloat16, queries=half, tolerance=3e-2)


@pytest.mark.parametrize(("lengths", "new"), SHAPES)
@pytest.mark.parametrize("kind", CACHES)
def test_half_precision_over_every_cache(
    device: torch.device, half: torch.dtype, lengths: list[int], new: list[int], kind: str
) -> None:
    heads = HEADS[0] if REHEARSES else (32, 8, 128)
    compare(device, lengths, new, heads, dtype=CACHES[kind], queries=half, tolerance=3e-2)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("kind", list(CACHES)[1:])
def test_prompts_over_blocks_that_are_copied_whole(
    device: torch.device, half: torch.dtype, kind: str, window: int | None
) -> None:
    """By Hopper's copy engine, where there is one: what lies behind a history in its last block is NaN."""
    compare(
        device,
        [300, 129, 257, 5],
        [200, 129, 65, 1],
        HEADS[0] if REHEARSES else (32, 8, 128),
        dtype=half if kind == "bf16" else CACHES[kind],
        queries=half,
        options=AttentionOptions(scale=0.1, window=window),
        tolerance=3e-2,
        block_size=64,
        arch="sm_90" if REHEARSES else "",
    )


@pytest.mark.parametrize("window", [1, 17, 256])
@pytest.mark.parametrize("queries", [torch.float32, None])
def test_windows_soft_caps_and_sinks(
    device: torch.device, half: torch.dtype, window: int, queries: torch.dtype | None
) -> None:
    compare(
        device,
        [530, 600, 40],
        [150, 1, 40],
        HEADS[-1] if queries is None else HEADS[0],
        queries=queries or half,
        dtype=queries or torch.bfloat16,
        options=AttentionOptions(scale=0.3, window=window, soft_cap=2.0),
        with_sinks=True,
        tolerance=3e-2 if queries is None else 1e-4,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_latent_attention(device: torch.device, half: torch.dtype, dtype: torch.dtype) -> None:
    heads = (16, 1, 48) if REHEARSES else (128, 1, 576)
    options = AttentionOptions(scale=0.05)
    compare(
        device,
        [270, 33],
        [1, 33],
        heads,
        value_dim=0,
        dtype=dtype,
        queries=half,
        options=options,
        tolerance=3e-2,
    )


def test_rows_do_not_depend_on_the_batch(device: torch.device, half: torch.dtype) -> None:
    lengths, heads = [700, 333, 64, 1025], HEADS[-1]
    cache, tables, generator = filled_cache(
        lengths, num_heads=heads[1], key_dim=heads[2], value_dim=heads[2], dtype=torch.bfloat16
    )
    q = torch.randn(len(lengths), heads[0], heads[2], generator=generator).to(half)
    there, options = moved(cache, device), AttentionOptions(scale=0.1)
    together = run_on(device, step_of(lengths, [1] * 4, tables), q, there, options, None, heads)
    for index, length in enumerate(lengths):
        batch = step_of([length], [1], tables[index : index + 1])
        alone = run_on(device, batch, q[index : index + 1], there, options, None, heads)
        assert torch.equal(alone[0], together[index])


@pytest.mark.parametrize("window", [None, 100])
def test_captured_steps_give_the_bits_of_eager_ones(
    device: torch.device, half: torch.dtype, window: int | None
) -> None:
    heads, block_size, longest, rows = HEADS[-1], 16, 1024, 5
    attention = TritonAttention(num_heads=heads[0], num_kv_heads=heads[1])
    width = longest // block_size
    batch = DecodeBatch(
        context_lens=torch.ones(rows, dtype=torch.int32, device=device),
        block_tables=torch.zeros(rows, width, dtype=torch.int32, device=device),
        block_size=block_size,
        max_context_len=longest,
    )
    plan = attention.plan_decode(batch)
    options = AttentionOptions(scale=0.1, window=window)
    q = torch.zeros(rows, heads[0], heads[2], dtype=half, device=device)
    cache, tables, generator = filled_cache(
        [700, 333, 64, 1000, 1],
        num_heads=heads[1],
        key_dim=heads[2],
        value_dim=heads[2],
        dtype=torch.bfloat16,
    )
    there = moved(cache, device)

    def step() -> torch.Tensor:
        attention.begin(plan)
        return attention.run(plan, q, there, options)

    replay, out = _captured(step, device)
    for lengths in ([700, 333, 64, 1000, 1], [690, 17, 1, 257, 1]):
        batch.context_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        batch.block_tables[:, : tables.shape[1]] = torch.from_numpy(tables.astype(np.int32)).to(device)
        fresh = torch.randn(*q.shape, generator=generator).to(half)
        q.copy_(fresh)
        replay()
        eager = run_on(device, step_of(lengths, [1] * rows, tables), fresh, there, options, None, heads)
        assert torch.equal(out[0], eager)


def _captured(step, device: torch.device):  # type: ignore[no-untyped-def]
    """A function that replays `step`, and a list whose entry is its result."""
    out = [step()]
    if REHEARSES:

        def again() -> None:
            out[0] = step()

        return again, out
    step()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out[0] = step()
    return graph.replay, out
