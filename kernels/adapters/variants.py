"""Adapters as real models launch them: what compile_ahead compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernels.adapters.reference import TorchChanges
from kernels.adapters.triton_adapters import TritonAdapterStep

INPUTS, SIZES, SLOTS = 4096, (4096, 1024, 1024), 8
# For tiles of few, some and many rows.
ROWS = (5, 100, 1000)


def variants() -> Iterator[tuple[str, Callable[[], object]]]:
    """q, k and v together, of the smallest and the largest rank."""
    meta = torch.device("meta")
    for dtype in (torch.bfloat16, torch.float32):
        for rank in (16, 64):
            changes = TorchChanges(INPUTS, SIZES, num_slots=SLOTS, max_rank=rank, dtype=dtype, device=meta)
            for rows in ROWS:
                name = f"adapters of rank {rank}, {str(dtype).removeprefix('torch.')}, {rows} rows"
                yield name, partial(_add, changes, rows)


def _add(changes: TorchChanges, rows: int) -> None:
    make = partial(torch.empty, dtype=changes.down.dtype, device=changes.down.device)
    step = TritonAdapterStep(torch.zeros(rows, dtype=torch.int64, device="meta"), SLOTS)
    step.add(changes, make(rows, INPUTS), make(rows, sum(SIZES)))
