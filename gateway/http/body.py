"""Decodes a request's body, with errors that name the field."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import TypeVar

import msgspec
from msgspec import inspect

from contract.errors import MillraceError, Reason, invalid, unsupported
from gateway.http.utf8 import check_utf8, half_pair

Body = TypeVar("Body")
Fields = dict[str, msgspec.Raw]
_fields, _encode = msgspec.json.Decoder(Fields).decode, msgspec.json.Encoder().encode

# msgspec says where: "Expected `int`, got `str` - at `$.max_tokens`".
_AT = re.compile(r" - at (?:`key` in )?`\$(?P<path>[^`]*)`$")
# A field's number such as 1.0 is an integer for JSON Schema, and for languages that have one kind of number.
# Those in lists stay: the lists of numbers that a body has are token ids, and whoever sends a float there has
# computed something else.
_IS_FLOAT = re.compile(r"^Expected `int[^`]*`, got `float` - at `\$\.(?P<path>[^`\[]*)`$")
# Objects of a body that have such fields, at most.
_MAX_ROUNDS = 8
# No whole number of a field is written longer.
_MAX_DIGITS = 40
# Characters of a key that an error shows.
_MAX_KEY = 80
# How JSON's values begin, by the names that errors have for their types.
_BEGINNINGS = {"str": b'"', "null": b"n", "bool": b"tf", "array": b"[", "object": b"{"} | dict.fromkeys(
    ("int", "float"), b"-0123456789"
)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_NOT_LISTED = re.compile(r"^Invalid enum value (?P<value>'.*')$", re.DOTALL)
# What a path goes through: a field, or an index.
_STEP = re.compile(r"[^.\[\]]+|\[[^\]]*\]")
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)


def decode(decoder: msgspec.json.Decoder[Body], body: bytes) -> Body:
    """The body as the decoder's type; raises MALFORMED_BODY, INVALID_ARGUMENT or UNSUPPORTED_FIELD."""
    try:
        check_utf8(body)
        return _decoded(decoder, body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), body, decoder.type) from error
    except msgspec.DecodeError as error:
        raise half_pair(body) or MillraceError(
            Reason.MALFORMED_BODY, f"the body is not JSON: {error}; send one JSON object (NaN is not JSON)"
        ) from error
    except UnicodeDecodeError as error:
        raise half_pair(body) or MillraceError(
            Reason.MALFORMED_BODY, f"the body is not UTF-8 at byte {error.start}; encode it as UTF-8"
        ) from error
    except RecursionError as error:
        raise MillraceError(
            Reason.MALFORMED_BODY, "the body is nested too deeply; 500 levels are far more than enough"
        ) from error


def _decoded(decoder: msgspec.json.Decoder[Body], body: bytes) -> Body:
    for _ in range(_MAX_ROUNDS):
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            found = _IS_FLOAT.match(str(error))
            changed = _with_whole(body, found["path"].split(".")) if found else body
            if changed == body:
                raise
            body = changed
    return decoder.decode(body)


def _with_whole(body: bytes, path: Sequence[str]) -> bytes:
    """The same with integers for the whole numbers beside the field at `path`. All else stays as it was
    written: the numbers of a schema mean what their digits say.
    """
    fields, (name, *below) = _fields(body), path
    if below:
        fields[name] = msgspec.Raw(_with_whole(bytes(fields[name]), below))
        return _encode(fields)
    return _encode({name: _whole(bytes(value)) for name, value in fields.items()})


def _whole(value: bytes) -> msgspec.Raw:
    if value[:1] in _BEGINNINGS["int"] and len(value) <= _MAX_DIGITS:
        with contextlib.suppress(ArithmeticError):
            number = Decimal(value.decode())
            if number.adjusted() < _MAX_DIGITS and number == int(number):
                value = b"%d" % int(number)
    return msgspec.Raw(value)


def _key_of(body: bytes, field: str, problem: str) -> str:
    """Which key of a mapping is meant, as far as the type of its value shows it."""
    begins = _BEGINNINGS.get(problem.rpartition("got `")[2].rstrip("`"), b"")
    try:
        values = _fields(bytes(_fields(body)[field]))
    except RecursionError:
        # The decoder stopped before it came to what is nested too deeply.
        return ""
    return next((name for name, value in values.items() if bytes(value)[:1] in begins), "")


def _listed(kind: object, path: str) -> list[str]:
    """What the field at a path of a body may be, where its type lists that."""
    found = _alternatives(inspect.type_info(kind))
    for step in _STEP.findall(path):
        found = [each for outer in found for inner in _inside(outer, step) for each in _alternatives(inner)]
    values: list[str] = []
    for each in found:
        match each:
            case inspect.EnumType(cls=members):
                values += [str(member.value) for member in members]
            case inspect.LiteralType(values=literals):
                values += map(str, literals)
            case _:
                pass
    return values


def _alternatives(kind: inspect.Type) -> Sequence[inspect.Type]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _inside(kind: inspect.Type, step: str) -> list[inspect.Type]:
    """The types of what a step of a path leads to."""
    match kind:
        case inspect.StructType(fields=fields):
            return [each.type for each in fields if each.encode_name == step]
        case inspect.ListType(item_type=item):
            return [item]
        case inspect.DictType(value_type=value):
            return [value]
        case _:
            return []


def _invalid(message: str, body: bytes, kind: object) -> MillraceError:
    at = _AT.search(message)
    path = at["path"].lstrip(".") if at else ""
    problem = message[: at.start()] if at else message
    named = _UNKNOWN.match(problem) or _MISSING.match(problem)
    if named:
        field = f"{path}.{named['name']}" if path else named["name"]
        if named.re is _MISSING:
            return invalid(field, "it is required")
        return unsupported(field, "it would have no effect, so leave it out", "unknown field")
    other = _NOT_LISTED.match(problem)
    if other:
        problem = f"{other['value']} is not one of {', '.join(_listed(kind, path))}"
    field, is_mapping, _ = path.partition("[...]")
    if is_mapping and field.isidentifier():
        key = _key_of(body, field, problem)
        return invalid(field, f"key {key[:_MAX_KEY]!r}: {problem}" if key else problem)
    return MillraceError(Reason.INVALID_ARGUMENT, f"{path or 'the body'}: {problem}", field=path)
