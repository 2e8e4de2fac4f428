"""Bodies from bytes to requests: at once where they are small, else counted first, in slices, and one of a
tenant at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from gateway.http.body import decode
from gateway.http.exchange import Exchange
from gateway.http.shape import SLICE_BYTES, BodyShape
from gateway.pipeline.intake import LARGE_BYTES, Intake

Body = TypeVar("Body")
Request = TypeVar("Request")


async def read(
    exchange: Exchange,
    intake: Intake,
    decoder: msgspec.json.Decoder[Body],
    convert: Callable[[Body], Request],
) -> tuple[Body, Request]:
    """The body, decoded, and what `convert` makes of it; the exchange forgets its bytes.

    Raises what `body.decode`, `BodyShape.feed` and `convert` raise.
    """
    data = exchange.take_body()
    if len(data) <= LARGE_BYTES:
        body = decode(decoder, data)
        return body, convert(body)
    async with intake.turn(exchange.verified_caller.identity.tenant) as slices:
        shape = BodyShape(intake.limits)
        for start in range(0, len(data), SLICE_BYTES):
            shape.feed(data[start : start + SLICE_BYTES])
            await slices.breathe()
        body = decode(decoder, data)
        del data
        await slices.rest()
        request = convert(body)
        await slices.rest()
    return body, request
