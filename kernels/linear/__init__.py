"""Matrix products whose rows do not depend on each other. A back end is chosen once, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.lazy import lazily

if TYPE_CHECKING:
    from kernels.linear.backends import *

__getattr__ = lazily("kernels.linear.backends")
