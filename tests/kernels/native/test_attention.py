"""Native attention against the reference, over odd sizes and NaN-poisoned caches; and its rows' bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import pytest
import torch

from kernels.attention.native import NativeAttention
from kernels.attention.reference import ReferenceAttention
from kernels.native.library import NativeLibrary
from tests.kernels.attention import (
    HEADS,
    PROMPTS,
    SHAPES,
    Step,
    assert_bits_alone,
    assert_bits_in_any_mix,
    compare,
    draw,
)
from tests.kernels.native.conftest import PRODUCT_LEVELS

MORE_HEADS = [*HEADS, (3, 3, 21), (16, 8, 128), (7, 1, 96), (3, 1, 64), (4, 1, 128)]
# Queries and weights are rounded to bfloat16 where pairs of those are multiplied, and to levels of 16 bits
# over an int8 or kivi4 cache. The reference computes in float32 from the same cache.
TOLERANCES = {
    torch.float32: 3e-6,
    torch.bfloat16: 2e-2,
    torch.int8: 1e-4,
    torch.float8_e4m3fn: 3e-6,
}
FLOAT32_TOLERANCE = 3e-6
Make = Callable[..., NativeAttention]


@pytest.fixture
def attention(product_level: NativeLibrary) -> Make:
    """The back end at a level, on two threads."""
    return partial(NativeAttention, library=product_level, num_threads=2)


@lru_cache(1)
def expected_of(
    shape: int, heads: tuple[int, int, int], dtype: torch.dtype
) -> list[tuple[Step, torch.Tensor]]:
    """Steps of a shape, and what the reference gives: levels of one case follow each other."""
    lengths, new = SHAPES[shape]
    drawn = draw(lengths, new, heads, dtype=dtype, padding=-sum(new) % 16, with_sinks=True)
    return [(step, step.run(ReferenceAttention)) for step in drawn.in_every_way()]


# The first of these varies fastest.
@pytest.mark.parametrize("product_level", PRODUCT_LEVELS, indirect=True, scope="function")
@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize("heads", MORE_HEADS)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_equals_reference(
    attention: Make, shape: int, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    for step, expected in expected_of(shape, heads, dtype):
        compare(attention, step, TOLERANCES[dtype], expected=expected)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("heads", MORE_HEADS)
def test_both_ways_to_multiply_bfloat16(attention: Make, heads: tuple[int, int, int], pairs: bool) -> None:
    """In float32, what the reference gives from the same cache; either way, a row alone has the same bits."""
    step = draw([300, 5, 129, 700], [200, 5, 1, 1], heads, dtype=torch.bfloat16)
    make = partial(attention, pairs=pairs)
    found = compare(make, step, TOLERANCES[torch.bfloat16] if pairs else FLOAT32_TOLERANCE)
    assert_bits_alone(make, step, found, [(0, 299, 300), (3, 699, 700)])


def test_results_that_no_cache_holds(attention: Make) -> None:
    """Of so many rows some levels write results past the caches, and take more rows in one unit."""
    step = draw([560], [544], (32, 32, 64), dtype=torch.bfloat16)
    found = compare(attention, step, TOLERANCES[torch.bfloat16])
    assert_bits_alone(attention, step, found, [(0, 299, 300), (0, 540, 560)])


@pytest.mark.parametrize("block_size", [4, 16, 32, 256])
@pytest.mark.parametrize("window", [None, 75])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_few_rows_of_several_heads(
    attention: Make, block_size: int, window: int | None, dtype: torch.dtype
) -> None:
    """Decoding sequences, enough of them that neighbouring heads are taken together: the reference's result,
    and that of each sequence alone, whose heads are not, to the bit.
    """
    lengths = [300, 17, 257, 512, 1, 33, 700, 255, 64]
    step = draw(lengths, [1] * 9, (12, 6, 32), dtype=dtype, block_size=block_size, window=window)
    assert_bits_alone(attention, step, compare(attention, step, TOLERANCES[dtype]))


@pytest.mark.parametrize("num_heads", [1, 16, 40])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_keys_that_hold_the_value(attention: Make, num_heads: int, dtype: torch.dtype) -> None:
    """Latent attention: one kv head, the value is the first part of the key; small blocks."""
    heads = (num_heads, 1, 152)
    step = draw([77, 700, 300], [1, 130, 2], heads, value_dim=0, dtype=dtype, block_size=4, scale=0.08)
    assert compare(attention, step, TOLERANCES[dtype]).shape == (133, num_heads, 76)


@pytest.mark.parametrize("num_heads", [2, 6, 16])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_rows_do_not_depend_on_batch_chunk_or_threads(
    attention: Make, num_heads: int, window: int | None, dtype: torch.dtype
) -> None:
    step = draw(PROMPTS, heads=(num_heads, 2, 36), dtype=dtype, window=window)
    assert_bits_in_any_mix(attention, step)
    assert torch.equal(step.run(attention), step.run(partial(attention, num_threads=1)))


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_shared_blocks_change_no_bit(attention: Make, window: int | None, dtype: torch.dtype) -> None:
    """Sequences with a common beginning, some with a longer one in common, some strangers, some short."""
    lengths, new = [1400, 1310, 1200, 1101, 1120, 90, 700, 1024, 3], [1, 2, 1, 1, 1, 1, 1, 40, 1]
    step = draw(lengths, new, (4, 2, 32), dtype=dtype, window=window)
    for row in (1, 2, 3, 4, 7):
        count = min(1100 // 16, -(-lengths[row] // 16))
        step.tables[row, :count] = step.tables[0, :count]
    step.tables[2, : 1190 // 16] = step.tables[1, : 1190 // 16]
    together = compare(attention, step, TOLERANCES[dtype])
    assert torch.equal(together, step.run(partial(attention, share=False)))
    assert_bits_alone(attention, step, together)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("value_dim", [36, 64, 160])
def test_bfloat16_of_all_magnitudes(
    product_level: NativeLibrary, attention: Make, value_dim: int, narrow: bool
) -> None:
    """Very large, very small and zero keys and values, in every part of a history; `narrow`: where weights
    and values are multiplied in float16, which cannot hold them all.
    """
    if narrow and product_level.level != "avx512_fp16":
        pytest.skip("this level rounds queries to bfloat16, and the largest keys show it")
    lengths, new = [600, 530, 520, 515], [600, 1, 2, 1]
    step = draw(lengths, new, (4, 2, 64), value_dim=value_dim, dtype=torch.bfloat16)
    keys, values = step.cache.tensors()[:2]
    for length, table in zip(lengths, step.tables, strict=True):
        for at, by in ((0, 2.0**-30), (3, 2.0**20), (70, 2.0**-10), (255, 2.0**100), (400, 2.0**11)):
            keys[int(table[at // 16]), :, at % 16, :5] *= by
            values[int(table[(at + 1) // 16]), :, (at + 1) % 16] *= min(by, 2.0**20)
        # Wholly small, and zero.
        keys[int(table[20 // 16]), :, 20 % 16] *= 2.0**-60
        keys[int(table[21 // 16]), :, 21 % 16] = 0.0
        values[int(table[(length - 1) // 16]), :, (length - 1) % 16] *= 2.0**9
        # Some lines of a value only.
        values[int(table[200 // 16]), :, 200 % 16, 33:] *= 2.0**7
        values[int(table[300 // 16]), :, 300 % 16, 3] = 32.0
    make = partial(attention, pairs=narrow)
    found, expected = step.run(make), step.run(ReferenceAttention)
    assert expected.isfinite().all()
    error = (found - expected).abs() / expected.abs().amax(-1, keepdim=True)
    assert error.max() < (2e-3 if narrow else 1e-5)
    alone = [(0, row, row + 1) for row in (4, 71, 257, 402, 599)]
    assert_bits_alone(make, step, found, [*alone, *step.each()[1:]])


@pytest.mark.parametrize("new", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_poisoned_sequence_keeps_its_poison(attention: Make, new: int, dtype: torch.dtype) -> None:
    """What is not finite shows in the sequence's own rows, and in no others."""
    step = draw([300, 290], [new, new], (2, 1, 64), dtype=dtype, scale=0.25)
    clean = step.run(attention)
    for poison in (float("nan"), float("inf")):
        spoiled = step.q.clone()
        spoiled[0] = poison
        found = replace(step, q=spoiled).run(attention)
        assert not found[0].isfinite().any()
        assert torch.equal(found[1:], clean[1:])
    for which, places in ((1, 1), (0, 64)):
        for poison in (float("nan"), float("inf")):
            held = step.cache.tensors()[which][int(step.tables[0, 2]), 0, 5]
            kept = held[7].item()
            held[7] = poison
            found = step.run(attention)
            held[7] = kept
            spoiled_places = ~found[:new].isfinite()
            # An infinite score may be minus infinity, which nobody notices.
            assert spoiled_places.any(-1).all() or (which == 0 and poison > 0 and spoiled_places.any())
            assert spoiled_places.sum(-1).max() >= places
            assert torch.equal(found[new:], clean[new:])


@pytest.mark.parametrize("chunk", [1, 40, 100, 300])
@pytest.mark.parametrize("window", [None, 60])
def test_queries_stay_in_their_chunk(attention: Make, chunk: int, window: int | None) -> None:
    step = draw([5, 130, 700, 650], [1, 40, 333, 1], (12, 6, 32), chunk=chunk, window=window)
    compare(attention, step, 3e-6)
    assert_bits_in_any_mix(attention, draw(PROMPTS, heads=(4, 2, 36), chunk=chunk, window=window))
