"""JSON types of the arguments of a tool, as far as its schema says them plainly: formats that write arguments
as plain text are read, and led, by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

JSON_TYPES: Mapping[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object",
    type(None): "null",
}  # fmt: skip
# References and alternatives are followed so many levels.
_MAX_DEPTH = 16


def kinds_of(schema: Any, root: Any, depth: int = _MAX_DEPTH) -> frozenset[str]:
    """Types of the values that `schema`, a part of `root`, takes; empty: any, or not known."""
    if not isinstance(schema, dict) or not depth:
        return frozenset()
    declared = _listed(schema, "type") or [schema.get("type")]
    kinds = frozenset(each for each in declared if isinstance(each, str))
    if kinds:
        return kinds | {"null"} if schema.get("nullable") is True else kinds
    if values := _listed(schema, "enum") or [schema[word] for word in ("const",) if word in schema]:
        return frozenset(JSON_TYPES[type(value)] for value in values)
    for word in ("anyOf", "oneOf"):
        alternatives = [kinds_of(part, root, depth - 1) for part in _listed(schema, word)]
        if alternatives:
            return frozenset().union(*alternatives) if all(alternatives) else frozenset()
    parts = [target_of(schema, root), *_listed(schema, "allOf")]
    return next(filter(None, (kinds_of(part, root, depth - 1) for part in parts)), frozenset())


def property_of(schema: Any, root: Any, key: str, depth: int = _MAX_DEPTH) -> Any:
    """The schema of a key of the objects that `schema` takes; None where it says nothing of it."""
    if not isinstance(schema, dict) or not depth:
        return None
    properties = schema.get("properties")
    if isinstance(properties, dict) and key in properties:
        return properties[key]
    parts = [part for word in ("allOf", "anyOf", "oneOf") for part in _listed(schema, word)]
    for part in [target_of(schema, root), *parts]:
        found = property_of(part, root, key, depth - 1)
        if found is not None:
            return found
    rest = schema.get("additionalProperties")
    return rest if isinstance(rest, dict) else None


def target_of(schema: dict[str, Any], root: Any) -> Any:
    """What a reference within the document leads to; None without one."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _listed(schema: dict[str, Any], word: str) -> list[Any]:
    value = schema.get(word)
    return value if isinstance(value, list) else []
