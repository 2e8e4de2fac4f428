"""FlashInfer's attention over the same paged cache, where it is installed: it compiles its kernels itself,
with nvcc, when they are first asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.device import Gpu, Timing, Work
from kernels.paged_cache.store import LayerCache

WORKSPACE_BYTES = 128 << 20
Tables = np.ndarray[Any, np.dtype[np.int64]]


def library(device: torch.device) -> Any | None:
    """The package, on a device that it knows."""
    if device.type != "cuda":
        return None
    try:
        import flashinfer
    except ImportError as error:
        print(f"    no flashinfer: {str(error)[:120]}", flush=True)
        return None
    return flashinfer


def prefill(cache: LayerCache, tables: Tables, q: Tensor, length: int) -> list[Work] | None:
    """The last tokens q [T, H, D] of one history, by the paged kernel; None where it cannot be had."""
    flashinfer = library(q.device)
    if flashinfer is None:
        return None
    try:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(q), "HND")
        starts = torch.tensor([0, q.shape[0]], dtype=torch.int32, device=q.device)
        wrapper.plan(starts, *_pages(tables, length, cache, q), *_sizes(cache, q), causal=True, **_types(q))
        return [_first_run(lambda: wrapper.run(q, (cache.keys, cache.values)))]
    except Exception as error:
        print(f"    flashinfer: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return None


def decode(caches: list[tuple[LayerCache, Tables]], q: Tensor, length: int) -> list[Work] | None:
    """A token q [S, H, D] of every history, over each of the caches."""
    flashinfer = library(q.device)
    if flashinfer is None:
        return None
    works = []
    try:
        for cache, tables in caches:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                _workspace(q), "HND", use_tensor_cores=True
            )
            wrapper.plan(*_pages(tables, length, cache, q), *_sizes(cache, q), **_types(q))
            both = (cache.keys, cache.values)
            works.append(_first_run(lambda wrapper=wrapper, both=both: wrapper.run(q, both)))
    except Exception as error:
        print(f"    flashinfer: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return None
    return works


def timed(gpu: Gpu, works: list[Work] | None) -> tuple[list[Work], Timing] | None:
    """The works with the time of one; None where there are none, or they cannot be timed."""
    if works is None:
        return None
    try:
        return works, gpu.time(works)
    except Exception as error:
        print(f"    flashinfer: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return None


def _workspace(q: Tensor) -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)


def _pages(tables: Tables, length: int, cache: LayerCache, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where each history's blocks begin, their numbers, and the tokens in each one's last."""
    count, width = tables.shape
    starts = torch.arange(count + 1, dtype=torch.int32, device=q.device) * width
    numbers = torch.from_numpy(tables.reshape(-1)).int().to(q.device)
    in_last = (length - 1) % cache.block_size + 1
    return starts, numbers, torch.full((count,), in_last, dtype=torch.int32, device=q.device)


def _sizes(cache: LayerCache, q: Tensor) -> tuple[int, int, int, int]:
    """Query heads, kv heads, head dim, tokens of a block."""
    return q.shape[1], cache.keys.shape[1], q.shape[2], cache.block_size


def _types(q: Tensor) -> dict[str, torch.dtype]:
    return {"q_data_type": q.dtype, "kv_data_type": q.dtype}


def _first_run(work: Work) -> Work:
    """Compiles, and raises what cannot be computed."""
    work()
    torch.cuda.synchronize()
    return work
