"""Storage of keys and values: what is written is what is gathered, in full precision and in int8."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.attention import poisoned_cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("value_dim", [6, 0])
def test_gather_returns_what_was_written(dtype: torch.dtype, value_dim: int) -> None:
    cache = poisoned_cache(dtype, 3, 10, value_dim, num_blocks=9)
    keys, values = torch.randn(36, 3, 10), torch.randn(36, 3, 6)
    slots = torch.randperm(36)
    cache.write(keys, values if value_dim else None, slots)
    place_of = torch.empty(36, dtype=torch.long)
    place_of[slots] = torch.arange(36)
    blocks = torch.tensor([[3, 0], [8, 5]])
    got_keys, got_values = cache.gather(blocks)
    assert got_keys.shape == (2, 3, 8, 10)
    expected_slots = (blocks[..., None] * 4 + torch.arange(4)).flatten(1)
    expected = keys[place_of[expected_slots]].transpose(1, 2)
    expected_values = values[place_of[expected_slots]].transpose(1, 2) if value_dim else expected[..., :5]
    tolerance = {torch.float32: 0.0, torch.bfloat16: 0.02, torch.int8: 0.02}.get(dtype, 0.0)
    # Three bits of mantissa: off by at most one part in sixteen.
    relative = 1 / 16 if dtype == torch.float8_e4m3fn else 0.0
    torch.testing.assert_close(got_keys, expected, atol=tolerance or 0.001, rtol=relative)
    torch.testing.assert_close(got_values, expected_values, atol=tolerance or 0.001, rtol=relative)


def test_int8_error_is_within_half_a_level() -> None:
    cache = poisoned_cache(torch.int8, 1, 64, 64, num_blocks=1, block_size=16)
    keys = torch.randn(16, 1, 64) * torch.logspace(-3, 3, 16)[:, None, None]
    keys[3] = 0
    cache.write(keys, keys, torch.arange(16))
    got = cache.gather(torch.tensor([[0]]))[0][0, 0]
    level = keys[:, 0].abs().amax(-1, keepdim=True) / 127
    assert bool(((got - keys[:, 0]).abs() <= 0.5001 * level).all())


def test_int8_does_not_hide_a_value_that_is_not_finite() -> None:
    """A poisoned sequence must fail, not answer with made-up numbers."""
    cache = poisoned_cache(torch.int8, 1, 8, 8, num_blocks=1)
    keys = torch.ones(4, 1, 8)
    keys[1, 0, 2] = float("nan")
    cache.write(keys, keys, torch.arange(4))
    got, _ = cache.gather(torch.tensor([[0]]))
    assert not got[0, 0, 1].isfinite().all()
    assert got[0, 0, [0, 2, 3]].isfinite().all()
