"""Which keywords of a schema the back end stops at, where only trying tells.

It refuses some patterns (overlapping ones of patternProperties, those that its parser does not know) and
divisors, and its errors name no place. So a schema that fails is tried without all such keywords; if that
helps, they are put back as far as it still does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_KEYWORDS = ("pattern", "patternProperties", "multipleOf")
# Keywords beyond which nobody looks, and trials: each costs a compilation.
_MAX_PLACES, _MAX_TRIALS = 256, 64


def places(schema: Any, prefix: str = "") -> list[str]:
    """JSON pointers of what the back end may stop at, after the prefix; beyond a limit none."""
    nodes = ((path, node) for path, node in parts(schema, prefix) if isinstance(node, dict))
    found = [f"{path}/{keyword}" for path, node in nodes for keyword in _KEYWORDS if keyword in node]
    return sorted(found) if len(found) <= _MAX_PLACES else []


def parts(schema: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All values inside a schema with their JSON pointers, after the prefix."""
    pending = [(prefix, schema)]
    while pending:
        path, node = pending.pop()
        yield path, node
        if isinstance(node, dict):
            escaped = ((key.replace("~", "~0").replace("/", "~1"), value) for key, value in node.items())
            pending += [(f"{path}/{key}", value) for key, value in escaped]
        elif isinstance(node, list):
            pending += [(f"{path}/{index}", value) for index, value in enumerate(node)]


def culprits(kept: list[str], works_without: Callable[[list[str]], bool]) -> list[str]:
    """A smallest set of the places without which it works, as far as the trials last; none if none is."""
    if not kept or not works_without(kept):
        return []
    # Whole parts are put back first, then smaller ones.
    trials, size = 0, max(1, len(kept) // 2)
    while trials < _MAX_TRIALS:
        start = 0
        while start < len(kept) and trials < _MAX_TRIALS:
            fewer = kept[:start] + kept[start + size :]
            trials += 1
            if fewer and works_without(fewer):
                kept = fewer
            else:
                start += size
        if size == 1:
            break
        size = max(1, size // 2)
    return kept
