"""Rotary position embedding. A back end is chosen once, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.lazy import lazily

if TYPE_CHECKING:
    from kernels.rope.backends import *

__getattr__ = lazily("kernels.rope.backends")
