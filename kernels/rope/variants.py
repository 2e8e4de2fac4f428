"""Rotations as real models launch them: what compile_ahead compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernels.paged_cache import allocate_layer
from kernels.rope.triton_rope import rope_and_store


def variants() -> Iterator[tuple[str, Callable[[], object]]]:
    """Llama's heads over every type of cache."""
    device = torch.device("meta")
    fused = torch.empty(2, 48, 128, dtype=torch.bfloat16, device=device)
    q, k, v = torch.split(fused, [32, 8, 8], dim=1)
    angles = torch.empty(2, 64, device=device)
    slots = torch.empty(2, dtype=torch.int64, device=device)
    for kind in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        cache = allocate_layer(
            num_blocks=1,
            block_size=16,
            num_heads=8,
            key_dim=128,
            value_dim=128,
            shared_value_dim=0,
            dtype=kind,
            device=device,
        )
        name = f"rope and store, {str(kind).removeprefix('torch.')}"
        yield name, partial(rope_and_store, q, k, v, angles, angles, slots, cache)
