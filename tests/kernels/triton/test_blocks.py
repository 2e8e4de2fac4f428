"""Blocks of every tensor of a cache, gathered into rows and spread again in one launch."""

from __future__ import annotations

import pytest
import torch

from kernels.paged_cache.triton_blocks import BLOCK, move_blocks

# Words of a block in each tensor: one, an odd number, more than one program takes.
SIZES = (1, 37, BLOCK + 5)


@pytest.mark.parametrize("chosen", [[0], [4, 1, 3]])
def test_rows_hold_blocks_and_bring_them_back(chosen: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [
        torch.randint(-(2**31), 2**31 - 1, (5, size), dtype=torch.int32, generator=generator)
        for size in SIZES
    ]
    offsets = [sum(SIZES[:index]) for index in range(len(SIZES))]
    described = [
        torch.tensor([tensor.data_ptr() for tensor in tensors]),
        torch.tensor(offsets),
        torch.tensor(SIZES),
    ]
    rows = torch.full((len(chosen) + 1, sum(SIZES)), -7, dtype=torch.int32)
    move_blocks(*described, torch.tensor(chosen), rows, largest=max(SIZES), out=True)
    assert torch.equal(rows[:-1], torch.cat([tensor[chosen] for tensor in tensors], dim=1))
    assert bool((rows[-1] == -7).all()), "rows of nobody stay as they were"
    before = [tensor.clone() for tensor in tensors]
    elsewhere = [(block + 1) % 5 for block in chosen]
    move_blocks(*described, torch.tensor(elsewhere), rows, largest=max(SIZES), out=False)
    for tensor, old in zip(tensors, before, strict=True):
        old[elsewhere] = old[chosen]
        assert torch.equal(tensor, old)
