"""What a block leaves to the garbage collector: objects of ours in cycles, and calls that errors remember."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_OURS = ("contract", "engine", "gateway", "observability", "services")


@contextmanager
def leftovers() -> Iterator[list[str]]:
    """A list that names, once the block is over, what of it only the garbage collector finds.

    Others' objects are left out: what a test's client leaves is no business of the code under test.
    """
    # What is there already is not looked at.
    gc.freeze()
    gc.disable()
    found: list[str] = []
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += filter(None, map(_name, gc.garbage))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()


def _name(item: Any) -> str:
    """The type of an object of ours, or where a call of our code stands; "" for others."""
    code = getattr(item, "f_code", None) or getattr(item, "cr_code", None)
    if isinstance(code, CodeType):
        path = Path(code.co_filename)
        ours = any(_ROOT / package in path.parents for package in _OURS)
        return f"{path.name}:{code.co_qualname}" if ours else ""
    kind = type(item)
    return f"{kind.__module__}.{kind.__qualname__}" if kind.__module__.split(".")[0] in _OURS else ""
