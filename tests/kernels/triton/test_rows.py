"""Kernels that work on single rows against their references, over odd sizes and poisoned outputs."""

from __future__ import annotations

import pytest
import torch

from kernels.activation import GATES
from kernels.activation import gate as reference_gate
from kernels.activation.triton_activation import gate
from kernels.linear.triton_scaled import quantize_rows
from kernels.norm.reference import rms_norm as reference_norm
from kernels.norm.triton_norm import LIMITS, TritonNorm, rms_norm
from kernels.paged_cache import allocate_layer
from kernels.rope import rotate
from kernels.rope.triton_rope import rope_and_store

WIDTHS = (1, 7, 64, 100, 513)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_equals_the_reference(width: int, dtype: torch.dtype) -> None:
    x, weight = drawn(5, width, dtype=dtype), drawn(width, seed=1)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6).out, reference_norm(x, weight, 1e-6))


@pytest.mark.parametrize("width", WIDTHS)
def test_norm_adds_the_residual_first(width: int) -> None:
    x, residual, weight = drawn(3, width), drawn(3, width, seed=2), drawn(width, seed=1)
    normed = rms_norm(x, weight, 1e-6, residual)
    assert normed.residual is not None
    torch.testing.assert_close(normed.residual, x + residual)
    torch.testing.assert_close(normed.out, reference_norm(x + residual, weight, 1e-6))


@pytest.mark.parametrize("quantized", ["int8", "fp8"])
def test_quantized_norm_stays_within_half_a_level(quantized: str) -> None:
    x, weight = drawn(6, 130), drawn(130, seed=1)
    x[2] = 0.0
    normed = rms_norm(x, weight, 1e-6, quantized=quantized)  # type: ignore[arg-type]
    assert normed.scale is not None
    back = normed.out.float() * normed.scale[:, None]
    wanted = reference_norm(x, weight, 1e-6)
    largest = wanted.abs().amax(-1, keepdim=True)
    # A level of float8_e4m3 near its end is 32 wide.
    level = largest / LIMITS[quantized] * (1.0 if quantized == "int8" else 32.0)
    assert bool(((back - wanted).abs() <= 0.51 * level + 1e-6).all())


@pytest.mark.parametrize("quantized", ["int8", "fp8"])
@pytest.mark.parametrize("width", [7, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rounding_in_the_norm_gives_the_bits_of_rounding_after_it(
    quantized: str, width: int, dtype: torch.dtype
) -> None:
    x, change, weight = drawn(5, width).to(dtype), drawn(5, width, seed=2).to(dtype), drawn(width, seed=1)
    x[2] = 0.0
    change[2] = 0.0
    factors = drawn(width, seed=3).abs() if quantized == "int8" else None
    norm = TritonNorm()
    for given in (None, change):
        stream, rows = norm.quantized(x, given, weight, 1e-5, quantized, factors)
        normed = norm.plain(x, weight, 1e-5)
        expected = x
        if given is not None:
            expected, normed = norm.added(x, given, weight, 1e-5)
        levels, scale = quantize_rows(normed, quantized, factors=factors)
        assert torch.equal(stream, expected)
        assert torch.equal(rows.levels.view(torch.uint8), levels.view(torch.uint8))
        assert torch.equal(rows.scale, scale)
        assert rows.dtype == dtype


def test_norm_of_a_poisoned_row_is_poisoned_and_others_are_not() -> None:
    x, weight = drawn(3, 64), drawn(64, seed=1)
    x[1, 5] = float("nan")
    out = rms_norm(x, weight, 1e-6).out
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("quantized", ["int8", "fp8"])
def test_quantizing_says_which_row_was_poisoned(quantized: str) -> None:
    x, weight = drawn(3, 64), drawn(64, seed=1)
    x[1, 5] = float("nan")
    normed = rms_norm(x, weight, 1e-6, quantized=quantized)  # type: ignore[arg-type]
    assert normed.scale is not None
    assert normed.scale.isfinite().tolist() == [True, False, True]


def test_norm_takes_columns_of_heads() -> None:
    x, weight = drawn(3, 90), drawn(10, seed=1)
    heads = x[:, 20:60].unflatten(1, (4, 10))
    torch.testing.assert_close(rms_norm(heads, weight, 1e-6).out, reference_norm(heads, weight, 1e-6))


@pytest.mark.parametrize("name", sorted(GATES))
@pytest.mark.parametrize("size", [1, 33, 1100])
def test_gates_equal_the_reference(name: str, size: int) -> None:
    x = drawn(3, 2 * size) * 4
    # Where erf or tanh cancels, what is left of magnitudes up to 200 is rounding.
    torch.testing.assert_close(gate(name, x), reference_gate(name, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("key_dim", "value_dim", "rotated"), [(64, 64, 64), (20, 12, 8), (128, 128, 64), (48, 0, 16)]
)
def test_rope_and_store_equal_rotation_and_cache_write(
    dtype: torch.dtype, interleaved: bool, key_dim: int, value_dim: int, rotated: int
) -> None:
    num_tokens, num_heads, num_kv_heads = 5, 6, 2
    options = {
        "num_blocks": 4,
        "block_size": 8,
        "num_heads": num_kv_heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
        "shared_value_dim": 16,
        "dtype": dtype,
        "device": torch.device("cpu"),
    }
    expected, cache = allocate_layer(**options), allocate_layer(**options)  # type: ignore[arg-type]
    for tensor in (*expected.tensors(), *cache.tensors()):
        tensor.fill_(77)
    sizes = [num_heads * key_dim, num_kv_heads * key_dim, num_kv_heads * value_dim]
    parts = torch.split(drawn(num_tokens, sum(sizes)), sizes, dim=-1)
    q, k = (part.unflatten(1, (-1, key_dim)) for part in parts[:2])
    v = parts[2].unflatten(1, (-1, value_dim)) if value_dim else None
    angles = drawn(num_tokens, rotated // 2, seed=3)
    slots = torch.tensor([3, 9, 17, 25, 31])
    out = rope_and_store(q, k, v, angles.cos(), angles.sin(), slots, cache, interleaved=interleaved)
    torch.testing.assert_close(out, rotate(q, angles.cos(), angles.sin(), interleaved=interleaved))
    expected.write(rotate(k, angles.cos(), angles.sin(), interleaved=interleaved), v, slots)
    for ours, theirs in zip(cache.tensors(), expected.tensors(), strict=True):
        # A rounding boundary may fall to either side: one level of int8.
        tolerance = 1.0 if dtype == torch.int8 and ours.dtype == torch.int8 else 1e-5
        torch.testing.assert_close(ours.float(), theirs.float(), atol=tolerance, rtol=1e-2)
