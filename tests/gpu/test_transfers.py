"""Blocks on real streams: what the model overwrites after its turn is not what reaches the host."""

from __future__ import annotations

import torch

from engine.runner.block_transfers import BlockTransfers
from engine.runner.streams import streams_of
from tests.gpu.conftest import REHEARSES

NUM_BLOCKS, NUM_HOST = 64, 32


def test_content_follows_the_plans_on_real_streams(device: torch.device) -> None:
    size = 64 if REHEARSES else 1 << 18
    tensors = [
        torch.zeros(NUM_BLOCKS, size, dtype=torch.int8, device=device),
        torch.zeros(NUM_BLOCKS, size // 8, dtype=torch.float32, device=device),
    ]
    transfers = BlockTransfers(tensors, NUM_HOST, streams_of(device))
    assert transfers.arena.pinned != REHEARSES

    def fill(value: int) -> None:
        for tensor in tensors:
            tensor[:NUM_HOST] = value

    for turn in range(1, 20):
        out = [(row, NUM_HOST - 1 - row) for row in range(NUM_HOST)]
        back = [(NUM_HOST - 1 - row, NUM_HOST + row) for row in range(NUM_HOST)]
        fill(turn)
        transfers.apply(out, [])
        # The model overwrites the blocks at once, while the copies may not have begun.
        fill(99)
        transfers.apply([], back)
        for tensor in tensors:
            assert bool((tensor[NUM_HOST:] == turn).all())
            assert bool((tensor[:NUM_HOST] == 99).all())
    if not REHEARSES:
        torch.cuda.synchronize(device)
    transfers.close()
