"""Latent attention reads the cache once for each group of heads that a program takes, not once a head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from kernels.attention import AttentionOptions, DecodeBatch
from kernels.attention.reference import ReferenceAttention
from kernels.attention.triton_attention import TritonAttention
from tests.kernels.test_attention import CPU, filled_cache, step_of

OPTIONS = AttentionOptions(scale=0.05)
KEY_DIM = 264


@pytest.mark.parametrize(
    ("num_heads", "stored", "times_read"),
    [(16, torch.float16, 1), (64, torch.float16, 1), (128, torch.float16, 2), (64, torch.int8, 2)],
)
def test_how_often_a_decode_row_reads_its_history(
    num_heads: int, stored: torch.dtype, times_read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [270, 21]
    cache, tables, generator = filled_cache(lengths, num_heads=1, key_dim=KEY_DIM, value_dim=0, dtype=stored)
    q = torch.randn(2, num_heads, KEY_DIM, generator=generator).half()
    attention = TritonAttention(num_heads=num_heads, num_kv_heads=1, arch="sm_90")
    first, num_bytes = cache.keys.data_ptr(), 0
    load = interpreter.InterpreterBuilder.create_masked_load

    def counted(builder: Any, pointers: Any, mask: Any, *others: Any, **named: Any) -> Any:
        nonlocal num_bytes
        inside = (pointers.data >= first) & (pointers.data < first + cache.keys.nbytes) & mask.data
        num_bytes += int(np.count_nonzero(inside)) * cache.keys.element_size()
        return load(builder, pointers, mask, *others, **named)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", counted)
    batch = step_of(lengths, [1, 1], tables)
    eager = attention.run(attention.plan(batch, CPU), q, cache, OPTIONS)
    history = sum(lengths) * KEY_DIM * cache.keys.element_size()
    assert num_bytes == times_read * history
    num_bytes = 0
    plan = attention.plan_decode(
        DecodeBatch(
            context_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=torch.from_numpy(tables).int(),
            block_size=16,
            max_context_len=512,
        )
    )
    attention.begin(plan)
    assert torch.equal(attention.run(plan, q, cache, OPTIONS), eager)
    assert num_bytes == times_read * history
    reference = ReferenceAttention(num_heads=num_heads, num_kv_heads=1)
    expected = reference.run(reference.plan(batch, CPU), q, cache, OPTIONS)
    torch.testing.assert_close(eager, expected, atol=2e-2, rtol=2e-2)


def test_a_token_of_many_heads_has_the_same_bits_alone() -> None:
    lengths = [270, 300]
    cache, tables, generator = filled_cache(
        lengths, num_heads=1, key_dim=KEY_DIM, value_dim=0, dtype=torch.float16
    )
    q = torch.randn(2, 64, KEY_DIM, generator=generator).half()
    attention = TritonAttention(num_heads=64, num_kv_heads=1, arch="sm_90")
    together = attention.run(attention.plan(step_of(lengths, [1, 1], tables), CPU), q, cache, OPTIONS)
    alone = attention.run(attention.plan(step_of([300], [1], tables[1:]), CPU), q[1:], cache, OPTIONS)
    assert torch.equal(together[1:], alone)
