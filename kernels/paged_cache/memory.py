"""Memory for the cache on huge pages.

A step reads the history in pieces of a few KiB, strewn over gigabytes: with pages of 4 KiB far more of them
than the processor's buffers hold address translations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.host import advise_huge_pages


def empty_on_huge_pages(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.empty, on a CPU with advice to use huge pages; a system without them serves small ones. Untouched
    memory costs nothing.
    """
    tensor = torch.empty(*shape, dtype=dtype, device=device)
    if device.type == "cpu":
        advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor
