"""Pieces of JSON Schema from which faces make their OpenAPI documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

REF = "#/components/schemas/{name}"
TEXT = {"type": "string"}
NULL = {"type": "null"}


def or_null(*schemas: Mapping[str, Any]) -> dict[str, Any]:
    """One of the schemas, or null."""
    return {"anyOf": [*schemas, NULL]}


def text(most: int | None = None, least: int = 0) -> dict[str, Any]:
    """A text of so many characters."""
    limits = {} if most is None else {"maxLength": most}
    return {**TEXT, **({"minLength": least} if least else {}), **limits}


def list_of(items: Mapping[str, Any], least: int = 1, most: int | None = None) -> dict[str, Any]:
    """A list of so many."""
    limits = {} if most is None else {"maxItems": most}
    return {"type": "array", "items": items, "minItems": least, **limits}


def ref(kind: type) -> dict[str, Any]:
    """The schema of a type, which is among the document's components."""
    return {"$ref": REF.format(name=kind.__name__)}


def object_of(*required: str, **properties: Any) -> dict[str, Any]:
    """What is said of some properties, and which must be there."""
    return {"properties": properties, "required": list(required)}


def answer_schemas(kinds: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """The schema of every type that an answer is made of, by the type's name."""
    _, found = msgspec.json.schema_components(tuple(kinds), ref_template=REF)
    for schema in found.values():
        # Fields with a default are required, because they are always written.
        properties = schema.get("properties", {}).items()
        filled = [name for name, each in properties if each.pop("default", None) is not None]
        schema["required"] = [*schema.get("required", ()), *filled]
    return found
