"""Bodies from bytes to requests: at once where they are small, else counted first, in slices, and one of a
tenant at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from gateway.faces.openai.ignored import decode_known, ignored
from gateway.faces.openai.shape import SLICE_BYTES, BodyShape
from gateway.http.exchange import Exchange
from gateway.pipeline.intake import LARGE_BYTES, Intake

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
    async with intake.turn(exchange.verified_caller.identity.tenant) as slices:
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
