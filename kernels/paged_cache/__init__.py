"""Storage of keys and values in blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.lazy import lazily

if TYPE_CHECKING:
    from kernels.paged_cache.store import *

__getattr__ = lazily("kernels.paged_cache.store")
