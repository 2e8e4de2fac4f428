"""Memory for the cache on huge pages.

A step reads the history in pieces of a few KiB, strewn over gigabytes: with pages of 4 KiB far more of them
than the processor's buffers hold address translations.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor


def empty_on_huge_pages(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.empty, on a CPU with advice to use huge pages; a system without them serves small ones. Untouched
    memory costs nothing.
    """
    tensor = torch.empty(*shape, dtype=dtype, device=device)
    size = math.prod(shape) * tensor.element_size()
    if device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if end - begin >= 2 << 20:
            advise = ctypes.CDLL(None).madvise
            advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
            advise(begin, end - begin, mmap.MADV_HUGEPAGE)
    return tensor
