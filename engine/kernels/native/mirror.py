"""The spelling of ctypes structures that mirror C++ ones; a test compares offsets with the compiler's."""

from __future__ import annotations

from typing import Any


def fields(kind: Any, *names: str) -> tuple[tuple[str, Any], ...]:
    """Neighbouring fields of one type."""
    return tuple((name, kind) for name in names)
