"""Forms of several parts (multipart/form-data), read piece by piece: a file in one may have any size."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder, NeedData

from contract.errors import MillraceError, Reason, invalid
from gateway.http.exchange import Exchange

_TYPE = "multipart/form-data"
_MAX_PARTS = 16
# What is read of a part's head, or of what stands before the first part, before it is refused.
_MAX_HELD_BYTES = 1 << 20
_PIECE_BYTES = 64 * 1024


class FormPiece(msgspec.Struct, frozen=True):
    """Some bytes of a part; `filename` is None where it is no file."""

    name: str
    filename: str | None
    data: bytes


async def form_pieces(exchange: Exchange) -> AsyncIterator[FormPiece]:
    """The parts of a form in their order, each in one or more pieces. Raises INVALID_ARGUMENT for one that is
    there twice, MALFORMED_BODY where it is no form or ends too early, and as `Exchange.body_pieces` does.
    """
    kind, options = parse_options_header(exchange.header(b"content-type"))
    boundary = options.get("boundary", "")
    if kind != _TYPE or not boundary:
        raise _malformed(f"its content-type is {kind[:40] or 'not there'!r}")
    decoder = MultipartDecoder(
        boundary.encode("latin-1", "replace"), max_form_memory_size=_MAX_HELD_BYTES, max_parts=_MAX_PARTS
    )
    part: Field | File | None = None
    names: set[str] = set()
    async for body in exchange.body_pieces():
        for start in range(0, len(body), _PIECE_BYTES):
            for event in _events(decoder, body[start : start + _PIECE_BYTES]):
                if isinstance(event, Field | File):
                    if event.name in names:
                        raise invalid(str(event.name)[:80], "the form has it twice; send it once")
                    part = event
                    names.add(event.name)
                elif isinstance(event, Data) and part is not None:
                    filename = part.filename if isinstance(part, File) else None
                    yield FormPiece(part.name or "", filename, event.data)
    if not any(isinstance(event, Epilogue) for event in _events(decoder, None)):
        raise _malformed("it ends before its last boundary")


def _events(decoder: MultipartDecoder, data: bytes | None) -> list[object]:
    """Everything that a piece completes; None is the end."""
    found: list[object] = []
    try:
        decoder.receive_data(data)
        while not isinstance(event := decoder.next_event(), NeedData):
            found.append(event)
            if isinstance(event, Epilogue):
                break
    except RequestEntityTooLarge as error:
        raise _malformed(f"it has more than {_MAX_PARTS} parts, or a part whose head has no end") from error
    except ValueError as error:
        raise _malformed(str(error)) from error
    return found


def _malformed(problem: str) -> MillraceError:
    return MillraceError(
        Reason.MALFORMED_BODY, f"the body is no form: {problem}; send {_TYPE} with its boundary"
    )
