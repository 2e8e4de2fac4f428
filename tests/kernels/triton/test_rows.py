"""Norms that round what they give, and norms of heads."""

from __future__ import annotations

import pytest
import torch

from kernels.norm.reference import rms_norm as reference_norm
from kernels.norm.triton_norm import LIMITS, rms_norm
from tests.kernels.drawn import drawn


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
