"""Latent attention reads the cache once for each group of heads that a program takes, not once a head."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from kernels.attention.ragged import DecodeBatch
from kernels.attention.triton_attention import TritonAttention
from tests.kernels.attention import assert_bits_alone, compare, draw

KEY_DIM = 264
LATENT: dict[str, Any] = {"value_dim": 0, "q_dtype": torch.float16, "scale": 0.05}
HOPPER = partial(TritonAttention, arch="sm_90")


@pytest.mark.parametrize(
    ("num_heads", "stored", "times_read"),
    [(16, torch.float16, 1), (64, torch.float16, 1), (128, torch.float16, 2), (64, torch.int8, 2)],
)
def test_how_often_a_decode_row_reads_its_history(
    num_heads: int, stored: torch.dtype, times_read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [270, 21]
    step = draw(lengths, [1, 1], (num_heads, 1, KEY_DIM), dtype=stored, **LATENT)
    keys: torch.Tensor = step.cache.keys  # type: ignore[attr-defined]
    first, num_bytes = keys.data_ptr(), 0
    load = interpreter.InterpreterBuilder.create_masked_load

    def counted(builder: Any, pointers: Any, mask: Any, *others: Any, **named: Any) -> Any:
        nonlocal num_bytes
        inside = (pointers.data >= first) & (pointers.data < first + keys.nbytes) & mask.data
        num_bytes += int(np.count_nonzero(inside)) * keys.element_size()
        return load(builder, pointers, mask, *others, **named)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", counted)
    eager = step.run(HOPPER)
    history = sum(lengths) * KEY_DIM * keys.element_size()
    assert num_bytes == times_read * history
    num_bytes = 0
    attention = HOPPER(num_heads=num_heads, num_kv_heads=1)
    plan = attention.plan_decode(
        DecodeBatch(
            context_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=torch.from_numpy(step.tables).int(),
            block_size=16,
            max_context_len=512,
        )
    )
    attention.begin(plan)
    assert torch.equal(attention.run(plan, step.q, step.cache, step.options), eager)
    assert num_bytes == times_read * history
    compare(HOPPER, step, 2e-2, 2e-2)


def test_a_token_of_many_heads_has_the_same_bits_alone() -> None:
    step = draw([270, 300], [1, 1], (64, 1, KEY_DIM), dtype=torch.float16, **LATENT)
    assert_bits_alone(HOPPER, step, step.run(HOPPER))
