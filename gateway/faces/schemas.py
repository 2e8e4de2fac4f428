"""What faces make their OpenAPI documents of: pieces of JSON Schema, refusals, and the frame."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import Any

import msgspec

from contract.errors import Reason
from contract.sampling import RANGES
from gateway.auth.authorizer import API_KEY_HEADERS
from gateway.types.request import FITTING

REF = "#/components/schemas/{name}"
TEXT = {"type": "string"}
NULL = {"type": "null"}

# What a request may be refused for by every API whose document lists reasons for all of its operations.
REASONS = (
    Reason.MALFORMED_BODY,
    Reason.INVALID_ARGUMENT,
    Reason.UNSUPPORTED_FIELD,
    Reason.CONTEXT_LENGTH_EXCEEDED,
    Reason.MISSING_CREDENTIALS,
    Reason.INVALID_CREDENTIALS,
    Reason.BUDGET_EXHAUSTED,
    Reason.MODEL_NOT_ALLOWED,
    Reason.TIER_NOT_ALLOWED,
    Reason.MODEL_NOT_FOUND,
    Reason.REQUEST_TOO_LARGE,
    Reason.REQUEST_RATE_EXCEEDED,
    Reason.CANCELLED,
    Reason.INTERNAL,
    Reason.DEADLINE_EXCEEDED,
    Reason.QUEUE_LIMIT_EXCEEDED,
    Reason.ENGINE_UNAVAILABLE,
)
# The same where files and batches are kept, and nothing is computed meanwhile.
STORED_REASONS = (
    Reason.MALFORMED_BODY,
    Reason.INVALID_ARGUMENT,
    Reason.UNSUPPORTED_FIELD,
    Reason.MISSING_CREDENTIALS,
    Reason.INVALID_CREDENTIALS,
    Reason.STORED_NOT_FOUND,
    Reason.METHOD_NOT_ALLOWED,
    Reason.REQUEST_TOO_LARGE,
    Reason.STORE_FULL,
    Reason.REQUEST_RATE_EXCEEDED,
    Reason.INTERNAL,
    Reason.STORE_UNAVAILABLE,
)


def or_null(*schemas: Mapping[str, Any]) -> dict[str, Any]:
    """One of the schemas, or null."""
    return {"anyOf": [*schemas, NULL]}


def text(most: int | None = None, least: int = 0) -> dict[str, Any]:
    """A text of so many characters."""
    limits = {} if most is None else {"maxLength": most}
    return {**TEXT, **({"minLength": least} if least else {}), **limits}


# `truncate_prompt_tokens`, as faces that have it declare it.
CUT = or_null({"const": FITTING}, {"type": "integer", "minimum": 1})
BEYOND_CUT = {"truncate_prompt_tokens": "the model and the tier have room for so many"}


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


def bound_options(properties: Mapping[str, Any]) -> None:
    """Writes the limits of sampling options into a body's properties."""
    for name, limits in RANGES.items():
        for branch in properties.get(name, {}).get("anyOf", ()):
            if branch.get("type") in ("integer", "number") and "minimum" not in branch:
                branch["minimum"], branch["maximum"] = limits.minimum, limits.maximum
    top_p = properties["top_p"]["anyOf"][0]
    top_p["exclusiveMinimum"] = top_p.pop("minimum")


def by_status(reasons: Iterable[Reason], status: Callable[[Reason], int]) -> dict[str, list[Reason]]:
    """Reasons by the HTTP status that a face gives them, in the order of the statuses."""
    found: dict[int, list[Reason]] = {}
    for reason in reasons:
        found.setdefault(status(reason), []).append(reason)
    return {str(each): found[each] for each in sorted(found)}


def told(reasons: Iterable[Reason]) -> str:
    """How a refusal of these reasons is described."""
    return ", ".join(reasons) + " and others of this status"


def framed(
    title: str,
    about: str,
    *,
    paths: Mapping[str, Any],
    components: Mapping[str, Any],
    beyond_reasons: Mapping[Reason, str],
    beyond: Mapping[str, str],
    **more: Any,
) -> bytes:
    """A document as JSON. A body that its schema allows is refused for what `beyond_reasons` lists by reason,
    and `beyond` by the error's field as a regular expression, alone: programs read it as `x-beyond-schema`.
    """
    keys = {name: {"type": "apiKey", "in": "header", "name": name} for name in API_KEY_HEADERS}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": title, "version": metadata.version("millrace"), "description": about},
            "security": [{"key": []}, *({name: []} for name in API_KEY_HEADERS)],
            **more,
            "paths": paths,
            "components": {
                **components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}, **keys},
            },
            "x-beyond-schema": [
                *({"reason": reason.value, "rule": rule} for reason, rule in beyond_reasons.items()),
                *({"param": f"^({field})$", "rule": rule} for field, rule in beyond.items()),
            ],
        }
    )
