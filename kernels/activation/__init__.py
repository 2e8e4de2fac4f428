"""Gates of feed-forward layers. A back end is chosen once, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.lazy import lazily

if TYPE_CHECKING:
    from kernels.activation.backends import *

__getattr__ = lazily("kernels.activation.backends")
