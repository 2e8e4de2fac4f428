"""Transfers of blocks as real models launch them: what compile_ahead compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernels.paged_cache.triton_blocks import move_blocks


def variants() -> Iterator[tuple[str, Callable[[], object]]]:
    """Out of the cache, and into it."""
    numbers = torch.empty(64, dtype=torch.int64, device="meta")
    rows = torch.empty(64, 1 << 16, dtype=torch.int32, device="meta")
    for name, out in (("out", True), ("in", False)):
        yield (
            f"blocks {name}",
            partial(move_blocks, numbers, numbers, numbers, numbers, rows, largest=1 << 14, out=out),
        )
