"""Root-mean-square norm. A back end is chosen once, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.lazy import lazily

if TYPE_CHECKING:
    from kernels.norm.backends import *

__getattr__ = lazily("kernels.norm.backends")
