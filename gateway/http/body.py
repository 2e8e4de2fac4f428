"""Decodes a request's body, with errors that name the field."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from contract.chat import Role
from contract.errors import MillraceError, Reason, invalid, unsupported

Body = TypeVar("Body")
_decode, _encode = msgspec.json.Decoder().decode, msgspec.json.Encoder().encode

# msgspec says where: "Expected `int`, got `str` - at `$.max_tokens`".
_AT = re.compile(r" - at (?:`key` in )?`\$(?P<path>[^`]*)`$")
# A field's number such as 1.0 is an integer for JSON Schema, and for languages that have one kind of number.
_IS_FLOAT = re.compile(r"^Expected `int[^`]*`, got `float`")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_ROLE = re.compile(r"^Invalid enum value (?P<value>'.*')$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)


def decode(decoder: msgspec.json.Decoder[Body], body: bytes) -> Body:
    """The body as the decoder's type; raises MALFORMED_BODY, INVALID_ARGUMENT or UNSUPPORTED_FIELD."""
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            if not _IS_FLOAT.match(str(error)):
                raise
            return decoder.decode(_encode(_whole(_decode(body))))
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except msgspec.DecodeError as error:
        raise MillraceError(
            Reason.MALFORMED_BODY, f"the body is not JSON: {error}; send one JSON object (NaN is not JSON)"
        ) from error
    except UnicodeDecodeError as error:
        raise MillraceError(
            Reason.MALFORMED_BODY, f"the body is not UTF-8 at byte {error.start}; encode it as UTF-8"
        ) from error
    except RecursionError as error:
        raise MillraceError(
            Reason.MALFORMED_BODY, "the body is nested too deeply; 500 levels are far more than enough"
        ) from error


def _whole(value: Any) -> Any:
    """The same with integers for floats of fields that are whole. Those in lists stay: the lists of numbers
    that a body has are token ids, and whoever sends a float there has computed something else.
    """
    match value:
        case list():
            return [_whole(each) for each in value]
        case dict():
            return {
                name: int(each) if isinstance(each, float) and each.is_integer() else _whole(each)
                for name, each in value.items()
            }
        case _:
            return value


def _invalid(message: str) -> MillraceError:
    at = _AT.search(message)
    path = at["path"].lstrip(".") if at else ""
    problem = message[: at.start()] if at else message
    named = _UNKNOWN.match(problem) or _MISSING.match(problem)
    if named:
        field = f"{path}.{named['name']}" if path else named["name"]
        if named.re is _MISSING:
            return invalid(field, "it is required")
        return unsupported(field, "it would have no effect, so leave it out", "unknown field")
    role = _ROLE.match(problem)
    if role:
        # Roles are the one enum of the bodies.
        problem = f"{role['value']} is not one of {', '.join(Role)}"
    return MillraceError(Reason.INVALID_ARGUMENT, f"{path or 'the body'}: {problem}", field=path)
