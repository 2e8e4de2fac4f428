"""Prompts whose steps Hopper's copy engine fetches, each a piece of a block: they get the bits of any other
fetch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from kernels.attention import triton_attention
from kernels.attention.triton_attention import TritonAttention
from kernels.paged_cache.store import PlainCache, QuantizedCache
from tests.kernels.attention import Step, assert_bits_alone, compare, draw

OPTIONS: tuple[dict[str, Any], ...] = (
    {"scale": 0.3},
    {"scale": 0.3, "window": 17},
    {"scale": 0.3, "window": 100, "soft_cap": 2.0},
)
HOPPER = partial(TritonAttention, arch="sm_90")


def counted(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Boxes of the descriptors that are made from now on."""
    boxes: list[list[int]] = []
    make = triton_attention.TensorDescriptor.from_tensor

    def noted(tensor: torch.Tensor, box: list[int]) -> object:
        boxes.append(box)
        return make(tensor, box)

    monkeypatch.setattr(triton_attention.TensorDescriptor, "from_tensor", noted)
    return boxes


def in_small_blocks(step: Step, small: int) -> Step:
    """The same contents in blocks of `small`."""
    cache = step.cache
    assert isinstance(cache, PlainCache | QuantizedCache)

    def cut(store: torch.Tensor) -> torch.Tensor:
        blocks, heads, _, dim = store.shape
        pieces = store.view(blocks, heads, -1, small, dim).transpose(1, 2)
        return pieces.reshape(-1, heads, small, dim).contiguous()

    values = None if cache.values is None else cut(cache.values)
    scales = () if cache.scales is None else (cut(cache.scales),)
    kind = PlainCache if cache.scales is None else QuantizedCache
    pieces = step.block_size // small
    finer = (step.tables[..., None] * pieces + np.arange(pieces)).reshape(len(step.tables), -1)
    whole = kind(cut(cache.keys), values, *scales, cache.shared_value_dim)
    return replace(step, cache=whole, tables=finer, block_size=small)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", [torch.float16, torch.int8])
@pytest.mark.parametrize(("block_size", "dim"), [(64, 16), (128, 24)])
def test_whole_blocks_give_the_bits_of_single_vectors(
    options: dict[str, Any], kind: torch.dtype, block_size: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    types = {"dtype": kind, "q_dtype": torch.float16, "block_size": block_size, "with_sinks": True}
    step = draw([300, 129, 200, 5], [90, 129, 65, 1], (4, 2, dim), **types | options)
    boxes = counted(monkeypatch)
    found = compare(HOPPER, step, 2e-2, 2e-2)
    # Rows of 24 bytes are none that the copy engine can read.
    bulk = dim * torch.empty(0, dtype=kind).element_size() % 16 == 0
    assert boxes == ([[64, 16 if dim == 16 else 32]] * 2 if bulk else [])
    boxes.clear()
    assert torch.equal(found, in_small_blocks(step, 16).run(HOPPER))
    assert not boxes, "a step of several blocks is fetched vector by vector"


@pytest.mark.parametrize("options", OPTIONS)
def test_a_row_does_not_depend_on_where_its_chunk_began(options: dict[str, Any]) -> None:
    types = {"dtype": torch.float16, "q_dtype": torch.float16, "block_size": 64}
    step = draw([300], [200], **types | options)
    assert_bits_alone(HOPPER, step, step.run(HOPPER), [(0, 217, 300)])
