"""Attention back ends against the reference, over odd sizes and NaN-poisoned memory; and their rows'
independence.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.attention import BACKENDS, AttentionOptions, RaggedBatch
from kernels.native import NativeUnavailableError, load_native
from kernels.paged_cache import LayerCache, allocate_layer

torch.set_num_threads(1)
CPU = torch.device("cpu")


def filled_cache(
    lengths: list[int],
    *,
    num_heads: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    block_size: int = 16,
) -> tuple[LayerCache, np.ndarray, torch.Tensor]:
    """A cache of random histories in shuffled blocks, NaN elsewhere; block tables; and the generator."""
    generator = torch.Generator().manual_seed(sum(lengths))
    num_blocks = sum(-(-length // block_size) for length in lengths) + 3
    cache = allocate_layer(
        num_blocks=num_blocks,
        block_size=block_size,
        num_heads=num_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        shared_value_dim=key_dim // 2,
        dtype=dtype,
        device=CPU,
    )
    for tensor in cache.tensors():
        if tensor.dtype.is_floating_point:
            tensor.fill_(float("nan"))
    shuffled = torch.randperm(num_blocks, generator=generator).numpy()
    tables = np.zeros((len(lengths), max(-(-length // block_size) for length in lengths)), np.int64)
    taken = 0
    for row, length in enumerate(lengths):
        count = -(-length // block_size)
        tables[row, :count] = shuffled[taken : taken + count]
        taken += count
        places = torch.from_numpy(np.repeat(tables[row, :count], block_size)[:length]) * block_size
        slots = places + torch.arange(length) % block_size
        keys = torch.randn(length, num_heads, key_dim, generator=generator)
        values = torch.randn(length, num_heads, value_dim, generator=generator) if value_dim else None
        cache.write(keys, values, slots)
    return cache, tables, generator


def step_of(lengths: list[int], new: list[int], tables: np.ndarray, block_size: int = 16) -> RaggedBatch:
    return RaggedBatch(
        query_starts=np.concatenate(([0], np.cumsum(new))),
        context_lens=np.array(lengths),
        block_tables=tables,
        block_size=block_size,
    )


SHAPES = [
    # (history of each sequence, new tokens of each)
    ([1], [1]),
    ([63], [63]),
    ([1000], [1]),
    ([257, 256, 255, 16, 17], [1, 1, 1, 1, 1]),
    ([300, 5, 129, 700], [200, 5, 1, 65]),
    ([40, 41, 600], [3, 9, 64]),
]


@pytest.mark.parametrize(("lengths", "new"), SHAPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim"), [(4, 4, 16), (4, 2, 64), (6, 2, 20), (5, 1, 8), (32, 1, 8)]
)
@pytest.mark.parametrize("options", ["plain", "window", "soft cap", "sinks"])
def test_tiled_equals_reference(
    lengths: list[int], new: list[int], num_heads: int, num_kv_heads: int, dim: int, options: str
) -> None:
    dtype = torch.bfloat16 if options == "plain" else torch.float32
    cache, tables, generator = filled_cache(
        lengths, num_heads=num_kv_heads, key_dim=dim, value_dim=dim, dtype=dtype
    )
    q = torch.randn(-(-sum(new) // 16) * 16, num_heads, dim, generator=generator)
    chosen = AttentionOptions(
        scale=dim**-0.5,
        window=50 if options == "window" else None,
        soft_cap=2.0 if options == "soft cap" else None,
    )
    sinks = torch.randn(num_heads, generator=generator) if options == "sinks" else None
    batch = step_of(lengths, new, tables)
    results = []
    for name in ("reference", "torch"):
        backend = BACKENDS[name](num_heads=num_heads, num_kv_heads=num_kv_heads)
        results.append(backend.run(backend.plan(batch, CPU), q, cache, chosen, sinks))
    torch.testing.assert_close(results[1], results[0], atol=2e-6, rtol=1e-5)
    assert results[1].isfinite().all()


def test_shared_latent_and_small_blocks() -> None:
    """Keys that hold the value in their first part, as in latent attention."""
    lengths, new = [77, 400], [1, 130]
    cache, tables, generator = filled_cache(
        lengths, num_heads=1, key_dim=24, value_dim=0, dtype=torch.float32, block_size=4
    )
    q = torch.randn(144, 16, 24, generator=generator)
    batch = step_of(lengths, new, tables, block_size=4)
    outs = []
    for name in ("reference", "torch"):
        backend = BACKENDS[name](num_heads=16, num_kv_heads=1)
        outs.append(backend.run(backend.plan(batch, CPU), q, cache, AttentionOptions(scale=0.2)))
    assert outs[0].shape == (144, 16, 12)
    torch.testing.assert_close(outs[1], outs[0], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("num_heads", [2, 4, 6, 16])
@pytest.mark.parametrize("window", [None, 100])
def test_rows_do_not_depend_on_batch_or_chunk(num_heads: int, window: int | None) -> None:
    """Bit for bit: any span, alone or among others, gives the rows of the whole prompt at once."""
    lengths = [600, 333, 90, 511, 7]
    cache, tables, generator = filled_cache(
        lengths, num_heads=2, key_dim=32, value_dim=32, dtype=torch.float32
    )
    backend = BACKENDS["torch"](num_heads=num_heads, num_kv_heads=2)
    options = AttentionOptions(scale=0.17, window=window)
    queries = [torch.randn(length, num_heads, 32, generator=generator) for length in lengths]

    def run(spans: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Attention of (sequence, start, end) spans in one step."""
        q = torch.cat([queries[which][start:end] for which, start, end in spans])
        padded = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, -q.shape[0] % 16))
        new = [end - start for _, start, end in spans]
        batch = step_of([end for *_, end in spans], new, tables[[which for which, *_ in spans]])
        return list(backend.run(backend.plan(batch, CPU), padded, cache, options)[: q.shape[0]].split(new))

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
    heads = {"num_heads": 4, "num_kv_heads": 2}
    cache, tables, generator = filled_cache(lengths, num_heads=2, key_dim=16, value_dim=16, dtype=dtype)
    q = torch.randn(-(-sum(new) // 16) * 16, 4, 16, generator=generator)
    options = AttentionOptions(scale=0.25, window=window)

    def attend(name: str, tables: np.ndarray) -> torch.Tensor:
        backend = BACKENDS[name](**heads)
        batch = step_of(lengths, new, tables)
        return backend.run(backend.plan(batch, CPU), q, cache, options)[: sum(new)]

    expected = attend("reference", tables)
    spare = cache.tensors()[0].shape[0] - 1
    if dtype is torch.int8:
        cache.tensors()[1][spare] = float("nan")
    cut = tables.copy()
    for row, (length, count) in enumerate(zip(lengths, new, strict=True)):
        cut[row, : max(0, length - count + 1 - window) // 16] = spare
    assert (cut == spare).sum() > 50
    tolerance = 2e-2 if (name, dtype) == ("native", torch.int8) else 3e-6
    torch.testing.assert_close(attend(name, cut), expected, atol=tolerance, rtol=tolerance)
