"""Prompts whose steps Hopper's copy engine fetches, each a piece of a block: they get the bits of any other
fetch.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.attention import AttentionOptions, triton_attention
from kernels.attention.ragged import RaggedBatch
from kernels.attention.reference import ReferenceAttention
from kernels.attention.triton_attention import TritonAttention
from kernels.paged_cache import LayerCache, PlainCache, QuantizedCache
from tests.kernels.test_attention import CPU, filled_cache, step_of

OPTIONS = (
    AttentionOptions(scale=0.3),
    AttentionOptions(scale=0.3, window=17),
    AttentionOptions(scale=0.3, window=100, soft_cap=2.0),
)
LENGTHS, NEW = [300, 129, 200, 5], [90, 129, 65, 1]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Boxes of the descriptors that are made from now on."""
    boxes: list[list[int]] = []
    make = triton_attention.TensorDescriptor.from_tensor

    def noted(tensor: torch.Tensor, box: list[int]) -> object:
        boxes.append(box)
        return make(tensor, box)

    monkeypatch.setattr(triton_attention.TensorDescriptor, "from_tensor", noted)
    return boxes


def in_small_blocks(
    cache: LayerCache, tables: np.ndarray, block_size: int, small: int
) -> tuple[LayerCache, np.ndarray]:
    """The same contents in blocks of `small`."""
    assert isinstance(cache, PlainCache | QuantizedCache)

    def cut(store: torch.Tensor) -> torch.Tensor:
        blocks, heads, _, dim = store.shape
        pieces = store.view(blocks, heads, -1, small, dim).transpose(1, 2)
        return pieces.reshape(-1, heads, small, dim).contiguous()

    values = None if cache.values is None else cut(cache.values)
    scales = () if cache.scales is None else (cut(cache.scales),)
    kind = PlainCache if cache.scales is None else QuantizedCache
    pieces = block_size // small
    finer = (tables[..., None] * pieces + np.arange(pieces)).reshape(len(tables), -1)
    return kind(cut(cache.keys), values, *scales, cache.shared_value_dim), finer


def run(
    batch: RaggedBatch,
    q: torch.Tensor,
    cache: LayerCache,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    attention = TritonAttention(num_heads=4, num_kv_heads=2, arch="sm_90")
    return attention.run(attention.plan(batch, CPU), q, cache, options, sinks)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", [torch.float16, torch.int8])
@pytest.mark.parametrize(("block_size", "dim"), [(64, 16), (128, 24)])
def test_whole_blocks_give_the_bits_of_single_vectors(
    options: AttentionOptions, kind: torch.dtype, block_size: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, tables, generator = filled_cache(
        LENGTHS, num_heads=2, key_dim=dim, value_dim=dim, dtype=kind, block_size=block_size
    )
    q = torch.randn(sum(NEW), 4, dim, generator=generator).half()
    sinks = torch.randn(4, generator=generator)
    boxes = counted(monkeypatch)
    batch = step_of(LENGTHS, NEW, tables, block_size)
    found = run(batch, q, cache, options, sinks)
    # Rows of 24 bytes are none that the copy engine can read.
    bulk = dim * cache.keys.element_size() % 16 == 0
    assert boxes == ([[64, 16 if dim == 16 else 32]] * 2 if bulk else [])
    boxes.clear()
    finer, fine_tables = in_small_blocks(cache, tables, block_size, 16)
    assert torch.equal(found, run(step_of(LENGTHS, NEW, fine_tables), q, finer, options, sinks))
    assert not boxes, "a step of several blocks is fetched vector by vector"
    reference = ReferenceAttention(num_heads=4, num_kv_heads=2)
    expected = reference.run(reference.plan(batch, CPU), q, cache, options, sinks)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_row_does_not_depend_on_where_its_chunk_began(options: AttentionOptions) -> None:
    cache, tables, generator = filled_cache(
        [300], num_heads=2, key_dim=16, value_dim=16, dtype=torch.float16, block_size=64
    )
    q = torch.randn(200, 4, 16, generator=generator).half()
    whole = run(step_of([300], [200], tables, 64), q, cache, options, None)
    last = run(step_of([300], [83], tables, 64), q[117:], cache, options, None)
    assert torch.equal(whole[117:], last)
