"""Attention in Triton against the reference, over odd sizes and NaN-poisoned memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.attention import AttentionOptions
from kernels.attention.reference import ReferenceAttention
from kernels.attention.triton_attention import TritonAttention
from kernels.attention.triton_plan import make_plan, part_sizes
from tests.kernels.test_attention import CPU, filled_cache, step_of

SHAPES = [
    ([1], [1]),
    ([63], [63]),
    ([600], [1]),
    ([257, 256, 255, 16, 17], [1, 1, 1, 1, 1]),
    ([300, 5, 129, 400], [200, 5, 1, 65]),
    ([40, 41, 300], [3, 9, 64]),
]


def part_size(context_len: int) -> int:
    return int(part_sizes(np.array([context_len]))[0])


def both(
    lengths: list[int],
    new: list[int],
    *,
    heads: tuple[int, int, int] = (4, 2, 16),
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    q_dtype: torch.dtype = torch.float32,
    options: AttentionOptions | None = None,
    with_sinks: bool = False,
    tables: np.ndarray | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_heads, num_kv_heads, dim = heads
    value_dim = dim if value_dim is None else value_dim
    cache, own_tables, generator = filled_cache(
        lengths, num_heads=num_kv_heads, key_dim=dim, value_dim=value_dim, dtype=dtype
    )
    batch = step_of(lengths, new, own_tables if tables is None else tables)
    q = torch.randn(sum(new), num_heads, dim, generator=generator).to(q_dtype)
    sinks = torch.randn(num_heads, generator=generator) if with_sinks else None
    options = options or AttentionOptions(scale=dim**-0.5)
    results = []
    for backend in (ReferenceAttention, TritonAttention):
        attention = backend(num_heads=num_heads, num_kv_heads=num_kv_heads)
        results.append(attention.run(attention.plan(batch, CPU), q, cache, options, sinks))
    return results[0], results[1]


@pytest.mark.parametrize(("lengths", "new"), SHAPES)
@pytest.mark.parametrize("heads", [(4, 2, 16), (6, 2, 20), (5, 1, 8)])
def test_ragged_batches(lengths: list[int], new: list[int], heads: tuple[int, int, int]) -> None:
    expected, found = both(lengths, new, heads=heads)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_caches_of_other_types(dtype: torch.dtype) -> None:
    expected, found = both([300, 20], [1, 20], dtype=dtype)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16])
def test_queries_of_two_bytes(q_dtype: torch.dtype, dtype: torch.dtype) -> None:
    expected, found = both([300, 40], [1, 40], q_dtype=q_dtype, dtype=dtype)
    assert found.dtype == q_dtype
    # Shares of the values are rounded to the queries' type.
    torch.testing.assert_close(found.float(), expected.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("dim", [20, 48])
def test_values_inside_keys(dtype: torch.dtype, dim: int) -> None:
    expected, found = both([270, 33], [1, 33], heads=(16, 1, dim), value_dim=0, dtype=dtype)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("lengths", "new"), [([600, 40], [1, 40]), ([530, 300], [3, 150])])
@pytest.mark.parametrize("window", [1, 17, 256])
def test_windows_soft_caps_and_sinks(lengths: list[int], new: list[int], window: int) -> None:
    options = AttentionOptions(scale=0.3, window=window, soft_cap=2.0)
    expected, found = both(lengths, new, options=options, with_sinks=True)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_a_shared_prefix_changes_no_bit() -> None:
    lengths, shared_blocks = [600, 580, 700], 32
    cache, tables, generator = filled_cache(
        lengths, num_heads=2, key_dim=16, value_dim=16, dtype=torch.float32
    )
    tables[1:, :shared_blocks] = tables[0, :shared_blocks]
    q = torch.randn(3, 4, 16, generator=generator)
    attention = TritonAttention(num_heads=4, num_kv_heads=2)
    options = AttentionOptions(scale=0.25)
    together = attention.run(attention.plan(step_of(lengths, [1, 1, 1], tables), CPU), q, cache, options)
    for index, length in enumerate(lengths):
        batch = step_of([length], [1], tables[index : index + 1])
        alone = attention.run(attention.plan(batch, CPU), q[index : index + 1], cache, options)
        assert torch.equal(alone[0], together[index])


def test_a_shared_prefix_is_read_once() -> None:
    tables = np.arange(120).reshape(3, 40)
    tables[1:, :32] = tables[0, :32]
    plan = make_plan(step_of([600, 580, 620], [1, 1, 1], tables), split_rows=4, tile_rows=16)
    shared = [(begin, end) for count, begin, end in plan.split.fields[[1, 3, 4]].T.tolist() if count == 3]
    assert shared == [(0, 256), (256, 512)]
    alone = [(begin, end) for count, begin, end in plan.split.fields[[1, 3, 4]].T.tolist() if count == 1]
    assert alone == [(512, 600), (512, 580), (512, 620)]


def test_parts_grow_with_the_history_and_stay_few() -> None:
    assert part_size(1) == part_size(64 * 256) == 256
    assert part_size(64 * 256 + 1) == 512
    assert all(-(-length // part_size(length)) <= 64 for length in (1, 10_000, 131_072, 1_000_000))
