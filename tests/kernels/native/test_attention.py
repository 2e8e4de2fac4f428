"""Native attention against the reference, over odd sizes and NaN-poisoned caches; and its rows' bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.attention import AttentionOptions, NativeAttention, RaggedBatch, ReferenceAttention
from kernels.native import NativeLibrary
from kernels.paged_cache import LayerCache, QuantizedCache
from tests.kernels.test_attention import CPU, filled_cache, step_of

SHAPES = [
    # (history of each sequence, new tokens of each)
    ([1], [1]),
    ([63], [63]),
    ([1000], [1]),
    ([257, 256, 255, 16, 17], [1, 1, 1, 1, 1]),
    ([300, 5, 129, 700], [200, 5, 1, 65]),
    ([40, 41, 600], [3, 9, 64]),
]
HEADS = [
    *[(4, 4, 16), (4, 2, 64), (6, 2, 20), (5, 1, 8), (32, 1, 8), (3, 3, 21), (16, 8, 128), (7, 1, 96)],
    *[(3, 1, 64), (4, 1, 128)],
]
# Queries and weights are rounded to bfloat16 where pairs of those are multiplied, and to levels of 16 bits
# over an int8 cache. The reference computes in float32 from the same cache.
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.int8: 1e-4}
FLOAT32_TOLERANCE = 3e-6
OPTIONS = ["plain", "window", "soft cap", "sinks"]


def attend(
    backend: NativeAttention | ReferenceAttention,
    batch: RaggedBatch,
    q: torch.Tensor,
    cache: LayerCache,
    options: AttentionOptions,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    return backend.run(backend.plan(batch, CPU), q, cache, options, sinks)


@pytest.mark.parametrize(("lengths", "new"), SHAPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_equals_reference(
    native: NativeLibrary,
    lengths: list[int],
    new: list[int],
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    dtype: torch.dtype,
) -> None:
    cache, tables, generator = filled_cache(
        lengths, num_heads=num_kv_heads, key_dim=dim, value_dim=dim, dtype=dtype
    )
    poison_scales(cache, lengths, tables)
    q = torch.randn(-(-sum(new) // 16) * 16, num_heads, dim, generator=generator)
    q[sum(new) :] = float("nan")
    sinks = torch.randn(num_heads, generator=generator)
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    for name in OPTIONS:
        options = AttentionOptions(
            scale=dim**-0.5,
            window=50 if name == "window" else None,
            soft_cap=2.0 if name == "soft cap" else None,
        )
        some = sinks if name == "sinks" else None
        batch = step_of(lengths, new, tables)
        backend = NativeAttention(**heads, library=native, num_threads=2)
        expected = attend(ReferenceAttention(**heads), batch, q, cache, options, some)
        found = attend(backend, batch, q, cache, options, some)
        torch.testing.assert_close(found, expected, atol=TOLERANCES[dtype], rtol=1e-5, msg=name)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), HEADS)
def test_both_ways_to_multiply_bfloat16(
    native: NativeLibrary, num_heads: int, num_kv_heads: int, dim: int, pairs: bool
) -> None:
    """In float32, what the reference gives from the same cache; either way, a row alone has the same bits."""
    lengths, new = [300, 5, 129, 700], [200, 5, 1, 1]
    cache, tables, generator = filled_cache(
        lengths, num_heads=num_kv_heads, key_dim=dim, value_dim=dim, dtype=torch.bfloat16
    )
    q = torch.randn(sum(new), num_heads, dim, generator=generator)
    options = AttentionOptions(scale=dim**-0.5)
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    batch = step_of(lengths, new, tables)
    backend = NativeAttention(**heads, library=native, num_threads=2, pairs=pairs)
    found = attend(backend, batch, q, cache, options)
    expected = attend(ReferenceAttention(**heads), batch, q, cache, options)
    tolerance = TOLERANCES[torch.bfloat16] if pairs else FLOAT32_TOLERANCE
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=1e-5)
    for row, length in ((199, 300), (206, 700)):
        which = 0 if row == 199 else 3
        single = attend(
            backend, step_of([length], [1], tables[which : which + 1]), q[row : row + 1], cache, options
        )
        assert torch.equal(single[0], found[row])


def poison_scales(cache: LayerCache, lengths: list[int], tables: np.ndarray) -> None:
    """filled_cache poisons floating-point tensors; levels of slots that nobody wrote may be anything, too."""
    if not isinstance(cache, QuantizedCache):
        return
    keys, values = cache.keys, cache.values
    written = torch.zeros(keys.shape[0], keys.shape[2], dtype=torch.bool)
    for row, length in enumerate(lengths):
        places = torch.arange(length)
        size = keys.shape[2]
        written[torch.from_numpy(tables[row])[places // size], places % size] = True
    for levels in (keys, values):
        assert levels is not None
        levels.transpose(1, 2)[~written] = 127


@pytest.mark.parametrize("block_size", [4, 16, 32, 256])
@pytest.mark.parametrize("window", [None, 75])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_few_rows_of_several_heads(
    native: NativeLibrary, block_size: int, window: int | None, dtype: torch.dtype
) -> None:
    """Decoding sequences, enough of them that neighbouring heads are taken together: the reference's result,
    and that of each sequence alone, whose heads are not, to the bit.
    """
    lengths, dim = [300, 17, 257, 512, 1, 33, 700, 255, 64], 32
    cache, tables, generator = filled_cache(
        lengths, num_heads=6, key_dim=dim, value_dim=dim, dtype=dtype, block_size=block_size
    )
    poison_scales(cache, lengths, tables)
    new = [1] * len(lengths)
    q = torch.randn(len(lengths), 12, dim, generator=generator)
    heads = {"num_heads": 12, "num_kv_heads": 6}
    options = AttentionOptions(scale=dim**-0.5, window=window)
    batch = step_of(lengths, new, tables, block_size)
    backend = NativeAttention(**heads, library=native, num_threads=2)
    found = attend(backend, batch, q, cache, options)
    expected = attend(ReferenceAttention(**heads), batch, q, cache, options)
    torch.testing.assert_close(found, expected, atol=TOLERANCES[dtype], rtol=1e-5)
    for row, length in enumerate(lengths):
        alone = step_of([length], [1], tables[row : row + 1], block_size)
        single = attend(backend, alone, q[row : row + 1], cache, options)
        assert torch.equal(single[0], found[row]), row


@pytest.mark.parametrize("num_heads", [1, 16, 40])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_keys_that_hold_the_value(native: NativeLibrary, num_heads: int, dtype: torch.dtype) -> None:
    """Latent attention: one kv head, the value is the first part of the key; small blocks."""
    lengths, new = [77, 700, 300], [1, 130, 2]
    cache, tables, generator = filled_cache(
        lengths, num_heads=1, key_dim=152, value_dim=0, dtype=dtype, block_size=4
    )
    q = torch.randn(144, num_heads, 152, generator=generator)
    batch = step_of(lengths, new, tables, block_size=4)
    backend = NativeAttention(num_heads=num_heads, num_kv_heads=1, library=native, num_threads=2)
    reference = ReferenceAttention(num_heads=num_heads, num_kv_heads=1)
    options = AttentionOptions(scale=0.08)
    found, expected = (attend(which, batch, q, cache, options) for which in (backend, reference))
    assert found.shape == (144, num_heads, 76)
    torch.testing.assert_close(found[:133], expected[:133], atol=TOLERANCES[dtype], rtol=1e-5)


@pytest.mark.parametrize("num_heads", [2, 6, 16])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_rows_do_not_depend_on_batch_chunk_or_threads(
    native: NativeLibrary, num_heads: int, window: int | None, dtype: torch.dtype
) -> None:
    """Bit for bit: any span, alone or among others, gives the rows of the whole prompt at once."""
    lengths = [600, 333, 90, 511, 7]
    cache, tables, generator = filled_cache(lengths, num_heads=2, key_dim=36, value_dim=36, dtype=dtype)
    backends = [
        NativeAttention(num_heads=num_heads, num_kv_heads=2, library=native, num_threads=count)
        for count in (1, 2)
    ]
    options = AttentionOptions(scale=0.17, window=window)
    queries = [torch.randn(length, num_heads, 36, generator=generator) for length in lengths]

    def run(spans: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Attention of (sequence, start, end) spans in one step."""
        q = torch.cat([queries[which][start:end] for which, start, end in spans])
        new = [end - start for _, start, end in spans]
        batch = step_of([end for *_, end in spans], new, tables[[which for which, *_ in spans]])
        single, several = (attend(backend, batch, q, cache, options) for backend in backends)
        assert torch.equal(single, several)
        return list(single.split(new))

    whole = [run([(which, 0, length)])[0] for which, length in enumerate(lengths)]
    mixes = [
        [(0, 599, 600)],
        [(0, 0, 100), (1, 100, 333), (2, 89, 90)],
        [(which, length - 1, length) for which, length in enumerate(lengths)],
        [(0, 250, 262), (3, 256, 257), (4, 0, 7), (1, 0, 333)],
        [(3, 13, 511), (0, 300, 305)],
    ]
    for mix in mixes:
        for (which, start, end), rows in zip(mix, run(mix), strict=True):
            assert torch.equal(rows, whole[which][start:end]), (mix, which)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_shared_blocks_change_no_bit(native: NativeLibrary, window: int | None, dtype: torch.dtype) -> None:
    """Sequences with a common beginning, some with a longer one in common, some strangers, some short."""
    shared = 1100
    lengths = [1400, 1310, 1200, 1101, 1120, 90, 700, 1024, 3]
    cache, tables, generator = filled_cache(lengths, num_heads=2, key_dim=32, value_dim=32, dtype=dtype)
    blocks = shared // 16
    for row in (1, 2, 3, 4, 7):
        count = min(blocks, -(-lengths[row] // 16))
        tables[row, :count] = tables[0, :count]
    tables[2, : 1190 // 16] = tables[1, : 1190 // 16]
    new = [1, 2, 1, 1, 1, 1, 1, 40, 1]
    q = torch.randn(sum(new), 4, 32, generator=generator)
    options = AttentionOptions(scale=0.2, window=window)
    batch = step_of(lengths, new, tables)
    heads = {"num_heads": 4, "num_kv_heads": 2}
    shares, alone = (
        NativeAttention(**heads, library=native, num_threads=2, share=share) for share in (True, False)
    )
    together = attend(shares, batch, q, cache, options)
    assert torch.equal(together, attend(alone, batch, q, cache, options))
    torch.testing.assert_close(
        together,
        attend(ReferenceAttention(**heads), batch, q, cache, options),
        atol=TOLERANCES[dtype],
        rtol=1e-5,
    )
    starts = np.cumsum([0, *new])
    for row, length in enumerate(lengths):
        part = q[starts[row] : starts[row + 1]]
        single = attend(shares, step_of([length], [new[row]], tables[row : row + 1]), part, cache, options)
        assert torch.equal(single, together[starts[row] : starts[row + 1]]), row


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("value_dim", [36, 64, 160])
def test_bfloat16_of_all_magnitudes(native: NativeLibrary, value_dim: int, narrow: bool) -> None:
    """Very large, very small and zero keys and values, in every part of a history; `narrow`: where weights
    and values are multiplied in float16, which cannot hold them all.
    """
    if narrow and native.level != "avx512_fp16":
        pytest.skip("this level rounds queries to bfloat16, and the largest keys show it")
    lengths, new = [600, 530, 520, 515], [600, 1, 2, 1]
    cache, tables, generator = filled_cache(
        lengths, num_heads=2, key_dim=64, value_dim=value_dim, dtype=torch.bfloat16
    )
    keys, values = cache.tensors()[:2]
    for length, table in zip(lengths, tables, strict=True):
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
    q = torch.randn(sum(new), 4, 64, generator=generator)
    options = AttentionOptions(scale=0.125, window=None)
    heads = {"num_heads": 4, "num_kv_heads": 2}
    backend = NativeAttention(**heads, library=native, num_threads=2, pairs=narrow)
    batch = step_of(lengths, new, tables)
    found = attend(backend, batch, q, cache, options)
    expected = attend(ReferenceAttention(**heads), batch, q, cache, options)
    assert expected.isfinite().all()
    error = (found - expected).abs() / expected.abs().amax(-1, keepdim=True)
    assert error.max() < (2e-3 if narrow else 1e-5)
    for row in (4, 71, 257, 402, 599):
        alone = step_of([row + 1], [1], tables[:1])
        assert torch.equal(attend(backend, alone, q[row : row + 1], cache, options)[0], found[row]), row
    starts = np.cumsum([0, *new])
    for which in (1, 2, 3):
        rows = slice(starts[which], starts[which + 1])
        alone = step_of([lengths[which]], [new[which]], tables[which : which + 1])
        assert torch.equal(attend(backend, alone, q[rows], cache, options), found[rows]), which


@pytest.mark.parametrize("new", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_poisoned_sequence_keeps_its_poison(native: NativeLibrary, new: int, dtype: torch.dtype) -> None:
    """What is not finite shows in the sequence's own rows, and in no others."""
    lengths = [300, 290]
    cache, tables, generator = filled_cache(lengths, num_heads=1, key_dim=64, value_dim=64, dtype=dtype)
    q = torch.randn(2 * new, 2, 64, generator=generator)
    backend = NativeAttention(num_heads=2, num_kv_heads=1, library=native)
    options = AttentionOptions(scale=0.25)
    batch = step_of(lengths, [new, new], tables)
    clean = attend(backend, batch, q, cache, options)
    for poison in (float("nan"), float("inf")):
        spoiled = q.clone()
        spoiled[0] = poison
        found = attend(backend, batch, spoiled, cache, options)
        assert not found[0].isfinite().any()
        assert torch.equal(found[1:], clean[1:])
    for which, places in ((1, 1), (0, 64)):
        for poison in (float("nan"), float("inf")):
            held = cache.tensors()[which][int(tables[0, 2]), 0, 5]
            kept = held[7].item()
            held[7] = poison
            found = attend(backend, batch, q, cache, options)
            held[7] = kept
            spoiled_places = ~found[:new].isfinite()
            # An infinite score may be minus infinity, which nobody notices.
            assert spoiled_places.any(-1).all() or (which == 0 and poison > 0 and spoiled_places.any())
            assert spoiled_places.sum(-1).max() >= places
            assert torch.equal(found[new:], clean[new:])
