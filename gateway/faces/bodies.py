"""Bodies from bytes to requests: at once where they are small, else counted first, in slices, and one of a
tenant at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from contract.errors import MillraceError, Reason
from gateway.faces.unserved import in_header
from gateway.http.body import decode
from gateway.http.exchange import Exchange
from gateway.http.utf8 import half_pair
from gateway.intake.intake import LARGE_BYTES, Intake
from gateway.intake.json_shape import ID_FIELDS, SLICE_BYTES, BodyShape

# Response header that names them.
IGNORED_HEADER = "x-millrace-ignored"

# Strange keys that the header names, and characters of each.
_MAX_NAMES = 8
_MAX_NAME = 64


@dataclass(frozen=True)
class Tolerance:
    """Where a body may have keys that this version does not know: they are ignored, and named in a header.

    Clients send back what other servers and SDKs wrote into earlier turns, and mark what another server may
    cache: there a strange key is no wish that would go unheard. A strange option of the request is one, and
    is refused.
    """

    # Fields of the body whose items may have them, and the items' types.
    fields: Mapping[str, type[msgspec.Struct]] = field(default_factory=dict)
    # Types of the objects inside of each, by the key that holds them.
    inside: Mapping[type[msgspec.Struct], Mapping[str, type[msgspec.Struct]]] = field(default_factory=dict)

    def drop(self, value: Any, kind: type[msgspec.Struct], path: str, names: list[str]) -> None:
        """Takes strange keys out of decoded JSON at `path`; `names` gets their paths."""
        if isinstance(value, list):
            for index, item in enumerate(value):
                self.drop(item, kind, f"{path}[{index}]", names)
        elif isinstance(value, dict):
            for name in [each for each in value if each not in kind.__struct_fields__]:
                del value[name]
                names.append(f"{path}.{name}")
            for name, inside in self.inside.get(kind, {}).items():
                self.drop(value.get(name), inside, f"{path}.{name}", names)


STRICT = Tolerance()
Body = TypeVar("Body")
Request = TypeVar("Request")
_by_field = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_anything = msgspec.json.Decoder()


def decode_known(
    decoder: msgspec.json.Decoder[Body], data: bytes, tolerance: Tolerance
) -> tuple[Body, list[str]]:
    """The body without the strange keys that are tolerated, and their names; raises what `body.decode`
    raises.
    """
    try:
        return decode(decoder, data), []
    except MillraceError as error:
        if error.reason is not Reason.UNSUPPORTED_FIELD or not error.field.startswith(
            tuple(f"{name}[" for name in tolerance.fields)
        ):
            raise
    if (half := half_pair(data)) is not None:
        # Of a part its place would be told as if the part were the body.
        raise half
    fields = _by_field(data)
    names: list[str] = []
    for name, kind in tolerance.fields.items():
        if name in fields:
            items = decode(_anything, bytes(fields[name]))
            tolerance.drop(items, kind, name, names)
            fields[name] = msgspec.Raw(msgspec.json.encode(items))
    # Everything else stays as it was written.
    return decode(decoder, msgspec.json.encode(fields)), names


def ignored(names: list[str]) -> dict[str, str]:
    """The header; {} where nothing was ignored."""
    if not names:
        return {}
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return {IGNORED_HEADER: ", ".join(in_header(name)[:_MAX_NAME] for name in names[:_MAX_NAMES]) + more}


async def read(
    exchange: Exchange,
    intake: Intake,
    decoder: msgspec.json.Decoder[Body],
    convert: Callable[[Body], Request],
    tolerance: Tolerance = STRICT,
    id_fields: Set[str] = ID_FIELDS,
) -> tuple[Body, Request]:
    """The body, decoded, and what `convert` makes of it; the exchange forgets its bytes, and its response
    names what was ignored. `id_fields` may hold token ids, which may be many.

    Raises what `body.decode`, `BodyShape.feed` and `convert` raise.
    """
    data = exchange.take_body()
    if len(data) <= LARGE_BYTES:
        body, names = decode_known(decoder, data, tolerance)
        exchange.add_headers(ignored(names))
        return body, convert(body)
    async with intake.exclusive(exchange.verified_caller.identity.tenant) as slices:
        shape = BodyShape(intake.limits, id_fields)
        for start in range(0, len(data), SLICE_BYTES):
            shape.feed(data[start : start + SLICE_BYTES])
            await slices.breathe()
        body, names = decode_known(decoder, data, tolerance)
        exchange.add_headers(ignored(names))
        del data
        await slices.rest()
        request = convert(body)
        await slices.rest()
    return body, request
