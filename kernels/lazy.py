"""Names of a package that are imported when they are first asked for.

Packages of operations hold back ends that need torch beside the plain structures of the native ops, and who
imports those should not pay for the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def lazily(module: str) -> Callable[[str], Any]:
    """A package's `__getattr__` (PEP 562): what `module` lists in `__all__` comes from there."""

    def get(name: str) -> Any:
        # Asked for before a module of the package by that name is imported, too.
        found = importlib.import_module(module)
        if name not in found.__all__:
            raise AttributeError(f"{module.rpartition('.')[0]} has no {name}")
        return getattr(found, name)

    return get
