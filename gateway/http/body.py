"""Reads a request body within its limit and decodes it, with errors that name the field."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeAlias, TypeVar

import msgspec

from services.errors import MillraceError, Reason

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Scope: TypeAlias = MutableMapping[str, Any]

Body = TypeVar("Body")

# msgspec says where: "Expected `int`, got `str` - at `$.max_tokens`".
_AT = re.compile(r" - at (?:`key` in )?`\$(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)


class ClientGoneError(Exception):
    """The client closed the connection before its request was complete."""


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], limit_bytes: int) -> bytes:
    """The whole body; raises REQUEST_TOO_LARGE as soon as it is known to be."""
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGoneError
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False) and len(body) <= limit_bytes:
        return body
    parts = [body]
    size = len(body)
    while message.get("more_body", False):
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
    if size > limit_bytes:
        raise _too_large(limit_bytes)
    return b"".join(parts)


def _too_large(limit_bytes: int) -> MillraceError:
    return MillraceError(
        Reason.REQUEST_TOO_LARGE,
        f"the body is larger than the limit of {limit_bytes} bytes; send less",
        metadata={"limit_bytes": str(limit_bytes)},
    )


def decode(decoder: msgspec.json.Decoder[Body], body: bytes) -> Body:
    """The body as the decoder's type; raises MALFORMED_BODY, INVALID_ARGUMENT or UNSUPPORTED_FIELD."""
    try:
        return decoder.decode(body)
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


def _invalid(message: str) -> MillraceError:
    at = _AT.search(message)
    path = at["path"].lstrip(".") if at else ""
    problem = message[: at.start()] if at else message
    unknown = _UNKNOWN.match(problem)
    if unknown:
        field = f"{path}.{unknown['name']}" if path else unknown["name"]
        return MillraceError(
            Reason.UNSUPPORTED_FIELD,
            f"{field}: unknown field; it would have no effect, so leave it out",
            field=field,
        )
    missing = _MISSING.match(problem)
    if missing:
        field = f"{path}.{missing['name']}" if path else missing["name"]
        return MillraceError(Reason.INVALID_ARGUMENT, f"{field}: it is required", field=field)
    where = f"{path}: " if path else ""
    return MillraceError(Reason.INVALID_ARGUMENT, f"{where}{problem}", field=path)
