"""Attention in torch against the reference, over odd sizes and NaN-poisoned memory; and its rows' bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.attention.backends import BACKENDS
from kernels.attention.reference import ReferenceAttention
from kernels.native.library import NativeUnavailableError, load_native
from tests.kernels.attention import HEADS, OPTIONS, PROMPTS, SHAPES, assert_bits_in_any_mix, compare, draw

TILED = BACKENDS["torch"]


@pytest.mark.parametrize(("lengths", "new"), SHAPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("options", OPTIONS)
def test_tiled_equals_reference(
    lengths: list[int], new: list[int], heads: tuple[int, int, int], options: str
) -> None:
    dtype = torch.bfloat16 if options == "plain" else torch.float32
    step = draw(lengths, new, heads, dtype=dtype, padding=-sum(new) % 16, **OPTIONS[options])
    assert compare(TILED, step, 2e-6).isfinite().all()


@pytest.mark.parametrize(("lengths", "new"), SHAPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_keys_by_channel_equal_reference(lengths: list[int], new: list[int], options: str) -> None:
    for heads in HEADS[:3]:
        step = draw(lengths, new, heads, dtype="kivi4", padding=-sum(new) % 16, **OPTIONS[options])
        assert compare(TILED, step, 2e-6).isfinite().all()


def test_shared_latent_and_small_blocks() -> None:
    """Keys that hold the value in their first part, as in latent attention."""
    step = draw([77, 400], [1, 130], (16, 1, 24), value_dim=0, block_size=4, padding=13, scale=0.2)
    assert compare(TILED, step, 2e-6).shape == (144, 16, 12)


@pytest.mark.parametrize("num_heads", [2, 4, 6, 16])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.float32, "kivi4"])
def test_rows_do_not_depend_on_batch_or_chunk(num_heads: int, window: int | None, dtype: Any) -> None:
    step = draw(PROMPTS, heads=(num_heads, 2, 32), window=window, dtype=dtype)
    assert_bits_in_any_mix(TILED, step, padding=16)


def backends_to_test() -> list[str]:
    try:
        load_native()
    except NativeUnavailableError:
        return ["reference", "torch"]
    return ["reference", "torch", "native"]


@pytest.mark.parametrize("name", backends_to_test())
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("window", [1, 40, 100, 300])
def test_blocks_before_the_window_may_hold_anything(name: str, dtype: torch.dtype, window: int) -> None:
    """Where a sequence has given up blocks, its table names the spare block, here full of NaN."""
    lengths, new = [1000, 700, 690, 300, 1000], [1, 1, 65, 70, 3]
    step = draw(lengths, new, dtype=dtype, padding=4, window=window)
    spare = step.cache.tensors()[0].shape[0] - 1
    if dtype is torch.int8:
        step.cache.tensors()[1][spare] = float("nan")
    cut = step.tables.copy()
    for row, (length, count) in enumerate(zip(lengths, new, strict=True)):
        cut[row, : max(0, length - count + 1 - window) // 16] = spare
    assert (cut == spare).sum() > 50
    tolerance = 2e-2 if (name, dtype) == ("native", torch.int8) else 3e-6
    found = replace(step, tables=cut).run(BACKENDS[name])
    torch.testing.assert_close(found, step.run(ReferenceAttention), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("chunk", [1, 40, 100, 300])
@pytest.mark.parametrize("window", [None, 60])
def test_queries_stay_in_their_chunk(chunk: int, window: int | None) -> None:
    step = draw([5, 130, 700], [1, 40, 333], chunk=chunk, window=window)
    compare(TILED, step, 2e-6)
    assert_bits_in_any_mix(TILED, draw(PROMPTS, heads=(4, 2, 32), chunk=chunk, window=window), padding=16)


@pytest.mark.parametrize("name", [name for name in backends_to_test() if name != "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "ahead"), [(None, 1 << 40), (21, 20), (300, 299), (1, 0), (5, 600)])
@pytest.mark.parametrize("heads", [(4, 4, 12), (6, 2, 32)])
def test_queries_may_look_ahead_to_the_end_of_their_own_text(
    name: str, dtype: torch.dtype, window: int | None, ahead: int, heads: tuple[int, int, int]
) -> None:
    lengths = [1, 2, 5, 16, 17, 130, 255, 256, 257, 600]
    step = draw(lengths, lengths, heads, dtype=dtype, padding=-sum(lengths) % 16, window=window, ahead=ahead)
    tolerance = 2e-2 if dtype is torch.bfloat16 and name == "native" else 3e-6
    found = step.run(BACKENDS[name])[: sum(lengths)]
    torch.testing.assert_close(
        found, step.run(ReferenceAttention)[: sum(lengths)], atol=tolerance, rtol=tolerance
    )
