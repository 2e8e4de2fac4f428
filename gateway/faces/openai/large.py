"""Bodies from bytes to requests: at once where they are small, else counted first, in slices, and one of a
tenant at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from contract.errors import MillraceError, Reason
from gateway.faces.openai.chat import (
    ContentPart,
    FunctionBody,
    FunctionCallBody,
    MessageBody,
    ToolBody,
    ToolCallBody,
)
from gateway.http.body import decode
from gateway.http.exchange import Exchange
from gateway.intake.intake import LARGE_BYTES, Intake
from gateway.intake.json_shape import SLICE_BYTES, BodyShape

# Keys of messages, parts, tool calls and tools that this version does not know: ignored, named in a header.
# Clients send back what other servers and SDKs wrote into earlier turns, and mark what another server may
# cache: there a strange key is no wish that would go unheard. A strange option of the request is one, and
# is refused (`fields`).

# Response header that names them.
IGNORED_HEADER = "x-millrace-ignored"

# Strange keys that the header names, and characters of each.
_MAX_NAMES = 8
_MAX_NAME = 64
# Fields of a body whose items may have strange keys.
FIELDS: Mapping[str, type[msgspec.Struct]] = {"messages": MessageBody, "tools": ToolBody}
_STRANGE = tuple(f"{field}[" for field in FIELDS)
# Types of the objects inside of each, by the key that holds them.
INSIDE: Mapping[type[msgspec.Struct], Mapping[str, type[msgspec.Struct]]] = {
    MessageBody: {"content": ContentPart, "tool_calls": ToolCallBody},
    ToolCallBody: {"function": FunctionCallBody},
    ToolBody: {"function": FunctionBody},
}
_by_field = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_anything = msgspec.json.Decoder()


def decode_known(decoder: msgspec.json.Decoder[Body], data: bytes) -> tuple[Body, list[str]]:
    """The body without strange keys in its messages and tools, and their names; raises what `body.decode`
    raises.
    """
    try:
        return decode(decoder, data), []
    except MillraceError as error:
        if error.reason is not Reason.UNSUPPORTED_FIELD or not error.field.startswith(_STRANGE):
            raise
    fields = _by_field(data)
    names: list[str] = []
    for field, kind in FIELDS.items():
        if field in fields:
            items = decode(_anything, fields[field])
            _drop(items, kind, field, names)
            fields[field] = msgspec.Raw(msgspec.json.encode(items))
    # Everything else stays as it was written.
    return decode(decoder, msgspec.json.encode(fields)), names


def ignored(names: list[str]) -> dict[str, str]:
    """The header; {} where nothing was ignored."""
    if not names:
        return {}
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    # Names are a client's words, and this is a header: `ascii` writes whatever could end it as an escape.
    return {IGNORED_HEADER: ", ".join(ascii(name)[1:-1][:_MAX_NAME] for name in names[:_MAX_NAMES]) + more}


def _drop(value: Any, kind: type[msgspec.Struct], path: str, names: list[str]) -> None:
    if isinstance(value, list):
        for index, item in enumerate(value):
            _drop(item, kind, f"{path}[{index}]", names)
    elif isinstance(value, dict):
        for name in [each for each in value if each not in kind.__struct_fields__]:
            del value[name]
            names.append(f"{path}.{name}")
        for name, inside in INSIDE.get(kind, {}).items():
            _drop(value.get(name), inside, f"{path}.{name}", names)


Body = TypeVar("Body")
Request = TypeVar("Request")


async def read(
    exchange: Exchange,
    intake: Intake,
    decoder: msgspec.json.Decoder[Body],
    convert: Callable[[Body], Request],
) -> tuple[Body, Request]:
    """The body, decoded, and what `convert` makes of it; the exchange forgets its bytes, and its response
    names what was ignored.

    Raises what `body.decode`, `BodyShape.feed` and `convert` raise.
    """
    data = exchange.take_body()
    if len(data) <= LARGE_BYTES:
        body, names = decode_known(decoder, data)
        exchange.add_headers(ignored(names))
        return body, convert(body)
    async with intake.exclusive(exchange.verified_caller.identity.tenant) as slices:
        shape = BodyShape(intake.limits)
        for start in range(0, len(data), SLICE_BYTES):
            shape.feed(data[start : start + SLICE_BYTES])
            await slices.breathe()
        body, names = decode_known(decoder, data)
        exchange.add_headers(ignored(names))
        del data
        await slices.rest()
        request = convert(body)
        await slices.rest()
    return body, request
