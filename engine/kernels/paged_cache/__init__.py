"""Storage of keys and values in blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.kernels.lazy import lazily

if TYPE_CHECKING:
    from engine.kernels.paged_cache.store import *

__getattr__ = lazily("engine.kernels.paged_cache.store")
