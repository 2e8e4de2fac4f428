"""Attention over a paged cache. A back end is chosen once, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.lazy import lazily

if TYPE_CHECKING:
    from kernels.attention.backends import *

__getattr__ = lazily("kernels.attention.backends")
