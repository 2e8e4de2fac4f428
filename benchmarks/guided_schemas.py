"""Schemas for guided runs: generated, so that nobody has tuned anything to them, and small enough for a weak
model to finish.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_NAMES = ("id", "name", "kind", "tags", "size", "note", "when", "place", "owner", "state", "näme", "x-y")
_WORDS = ("red", "green", "blue", "open", "closed", "a b", 'quote"d', "back\\slash", "東京", "")


def schemas(count: int, seed: int = 0) -> list[tuple[str, Schema]]:
    """Schemas with a name each that says how they were made; the same for the same seed."""
    kinds = list(_KINDS)
    found = []
    for index in range(count):
        source = random.Random(f"{seed}-{index}")
        kind = kinds[index % len(kinds)]
        found.append((f"{kind}-{index}", _KINDS[kind](source, 3)))
    return found


def _scalar(source: random.Random) -> Schema:
    low = source.randint(-50, 50)
    return source.choice(
        [
            {"type": "string", "maxLength": source.randint(0, 12)},
            {"type": "string", "minLength": 2, "maxLength": 8},
            {"type": "string", "pattern": source.choice([r"^[A-Z]{2}-\d{3}$", "^(yes|no)$", "^a.{0,5}z$"])},
            {"type": "string", "format": source.choice(["date", "time", "date-time", "uuid", "ipv4"])},
            {"type": "integer", "minimum": low, "maximum": low + source.randint(0, 1000)},
            {"type": "integer", "exclusiveMinimum": 0, "maximum": 10_000, "multipleOf": 5},
            {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
            {"type": "boolean"},
            {"type": "null"},
            {"const": source.choice([1, "one", None, True, {"a": [1]}])},
            {"enum": source.sample([*_WORDS, 1, 2.5, None, False], 3)},
        ]
    )


def _any(source: random.Random, depth: int) -> Schema:
    if depth <= 0 or source.random() < 0.5:
        return _scalar(source)
    return source.choice([_object, _array, _tuple, _union])(source, depth - 1)


def _object(source: random.Random, depth: int) -> Schema:
    names = source.sample(_NAMES, source.randint(1, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(source, depth - 1) for name in names},
        "required": source.sample(names, source.randint(0, len(names))),
        "additionalProperties": False,
    }
    if source.random() < 0.2:
        schema["maxProperties"] = len(names)
    return schema


def _array(source: random.Random, depth: int) -> Schema:
    least = source.randint(0, 2)
    return {
        "type": "array",
        "items": _any(source, depth - 1),
        "minItems": least,
        "maxItems": least + source.randint(0, 2),
    }


def _tuple(source: random.Random, depth: int) -> Schema:
    items = [_any(source, depth - 1) for _ in range(source.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _union(source: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(source, depth - 1) for _ in range(source.randint(2, 3))]}


def _one_of(source: random.Random, depth: int) -> Schema:
    def branch(tag: str) -> Schema:
        return {
            "type": "object",
            "properties": {"kind": {"const": tag}, "value": _any(source, depth - 1)},
            "required": ["kind", "value"],
            "additionalProperties": False,
        }

    return {"oneOf": [branch(tag) for tag in source.sample(["a", "b", "c", "d"], 3)]}


def _reference(source: random.Random, depth: int) -> Schema:
    return {
        "$defs": {"thing": _object(source, depth - 1)},
        "type": "object",
        "properties": {"first": {"$ref": "#/$defs/thing"}, "second": {"$ref": "#/$defs/thing"}},
        "required": ["first"],
        "additionalProperties": False,
    }


def _recursive(source: random.Random, depth: int) -> Schema:
    return {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": _scalar(source),
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    }


def _conditional(source: random.Random, depth: int) -> Schema:
    return {
        "type": "object",
        "properties": {"kind": {"enum": ["short", "long"]}, "size": {"type": "integer", "maximum": 999}},
        "required": ["kind"],
        "additionalProperties": False,
        "if": {"properties": {"kind": {"const": "long"}}},
        "then": {"required": ["size"], "properties": {"size": {"minimum": source.randint(1, 99)}}},
        "else": {"properties": {"size": {"maximum": 0, "minimum": -99}}},
    }


def _dependent(source: random.Random, depth: int) -> Schema:
    names = source.sample(_NAMES, 3)
    return {
        "type": "object",
        "properties": {name: _scalar(source) for name in names},
        "dependentRequired": {names[0]: [names[1]]},
        "minProperties": 1,
        "additionalProperties": False,
    }


def _not(source: random.Random, depth: int) -> Schema:
    return {
        "type": "array",
        "items": {"type": "string", "maxLength": 6, "not": {"enum": source.sample(_WORDS, 3)}},
        "minItems": 1,
        "maxItems": 3,
    }


def _unique(source: random.Random, depth: int) -> Schema:
    return {
        "type": "array",
        "items": {"enum": source.sample(_WORDS, 4)},
        "uniqueItems": True,
        "minItems": source.randint(0, 2),
    }


def _named(source: random.Random, depth: int) -> Schema:
    return {
        "type": "object",
        "patternProperties": {"^[a-c][0-9]$": _scalar(source)},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }


def _unbounded(source: random.Random, depth: int) -> Schema:
    """What people write: nothing but names and types."""
    names = source.sample(_NAMES, 3)
    kinds = [{"type": kind} for kind in ("string", "integer", "number", "boolean")]
    properties: Schema = {name: source.choice(kinds) for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


_KINDS: dict[str, Callable[[random.Random, int], Schema]] = {
    "object": _object,
    "array": _array,
    "tuple": _tuple,
    "union": _union,
    "oneOf": _one_of,
    "reference": _reference,
    "recursive": _recursive,
    "conditional": _conditional,
    "dependent": _dependent,
    "not": _not,
    "unique": _unique,
    "patternProperties": _named,
    "unbounded": _unbounded,
}
