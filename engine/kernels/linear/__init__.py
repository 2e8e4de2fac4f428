"""Matrix products whose rows do not depend on each other. A back end is chosen once, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.kernels.lazy import lazily

if TYPE_CHECKING:
    from engine.kernels.linear.backends import *

__getattr__ = lazily("engine.kernels.linear.backends")
