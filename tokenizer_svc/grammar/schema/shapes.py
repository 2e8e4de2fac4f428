"""Building blocks: JSON types as sets, and schemas joined by and, or, without empty layers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import msgspec

# A schema as llguidance takes it: an object or a boolean.
Schema = Any

# Numbers are two disjoint types here, so that sets of types have complements: whole ones and the others.
FRACTION = "fraction"
ALL_TYPES = frozenset({"null", "boolean", "integer", FRACTION, "string", "array", "object"})
NUMBERS = frozenset({"integer", FRACTION})
# An exponent, in what `_encoded` writes.
_EXPONENT = re.compile(rb"e[0-9]")
# The word null, which stands there for numbers that are not finite as well.
_NULL = re.compile(rb"(?<!\")null")
_encoded = msgspec.json.Encoder(order="sorted").encode
_NAMES = ("null", "boolean", "string", "array", "object")
_ADMITTED = {**{name: frozenset({name}) for name in (*_NAMES, "integer")}, "number": NUMBERS}
_NOTHING: frozenset[str] = frozenset()
_KINDS = {type(None): "null", bool: "boolean", int: "integer", str: "string", list: "array"}


def types_of_keyword(value: Any) -> frozenset[str]:
    """The types that `type: value` admits; unknown names admit nothing."""
    if isinstance(value, str):
        return _ADMITTED.get(value, _NOTHING)
    names = value if isinstance(value, list) else [value]
    return _NOTHING.union(*(_ADMITTED.get(name, _NOTHING) for name in names))


def type_of_value(value: Any) -> str:
    """The type of a JSON value."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else FRACTION
    return _KINDS.get(type(value), "object")


def list_of(value: Any) -> list[Any]:
    """A list as it is; none where there is something else."""
    return value if isinstance(value, list) else []


def type_names(types: frozenset[str]) -> list[str] | None:
    """Names for `type`; None when the set is not expressible (all fractions but no whole numbers)."""
    if FRACTION in types and "integer" not in types:
        return None
    names = [name for name in _NAMES if name in types]
    if FRACTION in types:
        names.append("number")
    elif "integer" in types:
        names.append("integer")
    return names


def any_of(options: Iterable[Schema]) -> Schema:
    """The union; True and False simplify."""
    flat: list[Schema] = []
    for option in options:
        if option is True or option == {}:
            return True
        if option is not False:
            flat += option["anyOf"] if len(option) == 1 and "anyOf" in option else [option]
    return _joined("anyOf", flat, False)


def all_of(parts: Iterable[Schema]) -> Schema:
    """The intersection; True and False simplify."""
    flat: list[Schema] = []
    for part in parts:
        if part is False:
            return False
        if part is not True and part != {}:
            flat += part["allOf"] if len(part) == 1 and "allOf" in part else [part]
    return _joined("allOf", flat, True)


def _joined(keyword: str, schemas: list[Schema], empty: bool) -> Schema:
    if len(schemas) > 1:
        schemas = list({key_of(each): each for each in schemas}.values())
    if not schemas:
        return empty
    return schemas[0] if len(schemas) == 1 else {keyword: schemas}


def for_type(kind: str, types: frozenset[str], schema: Schema) -> Schema:
    """`schema` for values of one type; the other types among `types` are admitted as they are."""
    if isinstance(schema, bool):
        restricted: Schema = {"type": kind} if schema else False
    elif "type" in schema or "allOf" in schema:
        restricted = all_of([{"type": kind}, schema])
    else:
        restricted = {"type": kind, **schema}
    others = types - {kind}
    # Fractions without whole numbers have no name; what surrounds the schema keeps whole numbers out.
    names = type_names(others) if type_names(others) is not None else type_names(others | NUMBERS)
    return any_of([restricted, {"type": names} if names else False])


def key_of(value: Any) -> str:
    """Equal for equal JSON values, whatever the order of keys; 1 and 1.0 are equal, 1 and true are not."""
    try:
        text = _encoded(value)
    except UnicodeEncodeError:
        # Half a surrogate pair, which is no UTF-8.
        return json.dumps(_canonical(value), sort_keys=True)
    if b"null" in text and _NULL.search(text):
        return json.dumps(_canonical(value), sort_keys=True)
    # Only texts with a fraction that may be none need another look.
    if b".0" in text or _EXPONENT.search(text):
        text = _encoded(_canonical(value))
    return text.decode()


def same(one: Any, other: Any) -> bool:
    """JSON equality. Python's alone takes 1 for true."""
    return bool(one == other) and key_of(one) == key_of(other)


def _canonical(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_canonical(each) for each in value]
    if isinstance(value, dict):
        return {key: _canonical(each) for key, each in value.items()}
    return value
