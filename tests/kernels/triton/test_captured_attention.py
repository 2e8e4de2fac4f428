"""Decode steps whose work the device lists give the bits of eager steps, from buffers that stay in place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.attention import AttentionOptions, CapturedAttention, DecodeBatch
from kernels.attention.triton_attention import TritonAttention
from tests.kernels.test_attention import CPU, filled_cache, step_of

MAX_CONTEXT = 700
ROWS = 6


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_bits_of_eager_steps(window: int | None, dtype: torch.dtype, with_sinks: bool) -> None:
    num_heads, num_kv_heads, dim = 6, 2, 16
    attention = TritonAttention(num_heads=num_heads, num_kv_heads=num_kv_heads)
    assert isinstance(attention, CapturedAttention)
    columns = -(-MAX_CONTEXT // 16)
    context_lens = torch.zeros(ROWS, dtype=torch.int32)
    block_tables = torch.zeros(ROWS, columns, dtype=torch.int32)
    plan = attention.plan_decode(
        DecodeBatch(
            context_lens=context_lens, block_tables=block_tables, block_size=16, max_context_len=MAX_CONTEXT
        )
    )
    options = AttentionOptions(scale=0.25, window=window)
    for lengths in ([1, 700, 256, 257, 17, 513], [700, 3, 300, 40, 41, 1]):
        cache, tables, generator = filled_cache(
            lengths, num_heads=num_kv_heads, key_dim=dim, value_dim=dim, dtype=dtype
        )
        q = torch.randn(ROWS, num_heads, dim, generator=generator)
        sinks = torch.randn(num_heads, generator=generator) if with_sinks else None
        batch = step_of(lengths, [1] * ROWS, tables)
        expected = attention.run(attention.plan(batch, CPU), q, cache, options, sinks)
        context_lens.copy_(torch.tensor(lengths))
        # What lies beyond a context names no block at all.
        block_tables.fill_(1 << 30)
        for row, length in enumerate(lengths):
            used = -(-length // batch.block_size)
            block_tables[row, :used] = torch.from_numpy(np.asarray(tables[row, :used])).int()
        attention.begin(plan)
        found = attention.run(plan, q, cache, options, sinks)
        assert torch.equal(found, expected)
