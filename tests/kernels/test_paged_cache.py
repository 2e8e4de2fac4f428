"""Storage of keys and values: what is written is what is gathered, in full precision and in int8."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.paged_cache import four_bits
from kernels.paged_cache.host import allocate_host_layer
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


@pytest.mark.parametrize("dim", [8, 24, 64])
@pytest.mark.parametrize("type_name", ["float32", "bfloat16", "int8", "fp8"])
def test_keys_are_widened_without_torch(type_name: str, dim: int) -> None:
    """Of any bytes but NaN what torch makes of them."""
    sizes = {"num_blocks": 9, "block_size": 4, "num_heads": 3, "key_dim": dim, "value_dim": dim}
    cache = allocate_host_layer(**sizes, shared_value_dim=0, type_name=type_name)
    generator = np.random.default_rng(dim)
    for part in cache.tensors():
        part[:] = generator.standard_normal(part.shape) if part.dtype == np.float32 else 0
        if part.dtype != np.float32:
            part.view(np.uint8)[:] = generator.integers(0, 127, part.view(np.uint8).shape)
    dtype = torch.float8_e4m3fn if type_name == "fp8" else getattr(torch, type_name)
    other = poisoned_cache(dtype, 3, dim, dim, num_blocks=9)
    for ours, theirs in zip(cache.tensors(), other.tensors(), strict=True):
        theirs.view(torch.uint8).copy_(torch.from_numpy(ours.view(np.uint8)))
    blocks = np.array([3, 0, 8])
    expected = other.gather(torch.from_numpy(blocks)[None])[0][0].view(3, 3, 4, dim).transpose(0, 1)
    torch.testing.assert_close(torch.from_numpy(cache.wide_keys(blocks)), expected, atol=1e-5, rtol=1e-6)


def four_bit_error(x: torch.Tensor, *, turned: bool = True) -> float:
    """Of vectors [16, D] in four bits, in parts of their length: rotated, or not."""
    got = four_bits.dequantize(*four_bits.quantize(x))
    if not turned:
        level = x.abs().amax(-1, keepdim=True) / 15
        got = ((x / level + 15) / 2).round().clamp(0, 15) * 2 * level - 15 * level
    return float(((got - x).norm() / x.norm()).item())


@pytest.mark.parametrize("dim", [8, 64, 80, 96, 128, 256])
def test_four_bits_keep_an_eighth_whatever_stands_out(dim: int) -> None:
    """Normal elements, a channel that is thirty times as large, and all elements shifted by as much."""
    drawn = torch.randn(16, dim, generator=torch.Generator().manual_seed(dim))
    keys = drawn * torch.logspace(-3, 3, 16)[:, None]
    for changed in (keys, torch.cat((keys[..., :1] * 30, keys[..., 1:]), dim=-1), drawn + 30):
        assert four_bit_error(changed) < 0.13


def test_the_rotation_keeps_what_lies_beside_an_outlier() -> None:
    """The other elements come through, where without the rotation all of them become one of two levels."""
    keys = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    keys[..., 5] = 8.0
    assert four_bit_error(keys) < 0.8 * four_bit_error(keys, turned=False)


def test_a_rotation_undoes_itself_and_keeps_products() -> None:
    for dim in (8, 24, 80, 128):
        q, k = torch.randn(5, dim, dtype=torch.float64), torch.randn(5, dim, dtype=torch.float64)
        turned = four_bits.turn(k)
        torch.testing.assert_close(four_bits.turn_back(turned), k)
        torch.testing.assert_close((four_bits.turn(q) * turned).sum(-1), (q * k).sum(-1))


def test_codes_are_where_the_kernels_look_for_them() -> None:
    packed = four_bits.pack(torch.arange(16))
    assert packed.tolist() == [0x40, 0x51, 0x62, 0x73, 0xC8, 0xD9, 0xEA, 0xFB]
    assert four_bits.levels_of(packed).tolist() == list(range(-15, 16, 2))


def test_int8_error_is_within_half_a_level() -> None:
    cache = poisoned_cache(torch.int8, 1, 64, 64, num_blocks=1, block_size=16)
    keys = torch.randn(16, 1, 64) * torch.logspace(-3, 3, 16)[:, None, None]
    keys[3] = 0
    cache.write(keys, keys, torch.arange(16))
    got = cache.gather(torch.tensor([[0]]))[0][0, 0]
    level = keys[:, 0].abs().amax(-1, keepdim=True) / 127
    assert bool(((got - keys[:, 0]).abs() <= 0.5001 * level).all())


def test_levels_do_not_hide_a_value_that_is_not_finite() -> None:
    """A poisoned sequence must fail, not answer with made-up numbers."""
    cache = poisoned_cache(torch.int8, 1, 8, 8, num_blocks=1)
    keys = torch.ones(4, 1, 8)
    keys[1, 0, 2] = float("nan")
    cache.write(keys, keys, torch.arange(4))
    got, _ = cache.gather(torch.tensor([[0]]))
    for rows in (got[0, 0], four_bits.dequantize(*four_bits.quantize(keys[:, 0]))):
        assert not rows[1].isfinite().all()
        assert rows[[0, 2, 3]].isfinite().all()
