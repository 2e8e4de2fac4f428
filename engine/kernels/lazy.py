"""Names of a package that are imported when they are first asked for.

Packages of operations hold back ends that need torch beside the plain structures of the native ops, and who
imports those should not pay for the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from typing import Any


def lazily(module: str, names: Collection[str]) -> Callable[[str], Any]:
    """A package's `__getattr__` (PEP 562): `names` come from `module`."""

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"{module.rpartition('.')[0]} has no {name}")
        return getattr(importlib.import_module(module), name)

    return get
