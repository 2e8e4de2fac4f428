"""Frames of HTTP/2 as no well-behaved client writes them: libraries refuse to."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 8, 9
END_STREAM, END_HEADERS = 1, 4
# Of a SETTINGS frame: what a stream may send before more is asked for.
INITIAL_WINDOW_SIZE = 4
# Largest frame that a peer takes which has not said otherwise, and the window that it gives to begin with.
MAX_FRAME_BYTES = 16 * 1024
_CANCEL = struct.pack(">I", 8)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers(
    stream: int, fields: Iterable[tuple[str, str]], *, ends: bool = False, is_whole: bool = True
) -> bytes:
    """A request's head; one that is not whole goes on in continuations."""
    flags = (END_HEADERS if is_whole else 0) | (END_STREAM if ends else 0)
    return frame(HEADERS, flags, stream, _block(fields))


def continuation(stream: int, fields: Iterable[tuple[str, str]]) -> bytes:
    """More of a head, and not its end."""
    return frame(CONTINUATION, 0, stream, _block(fields))


def _block(fields: Iterable[tuple[str, str]]) -> bytes:
    """Literal fields without indexing, names and values as they are (RFC 7541, 6.2.2)."""
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields)


def _text(text: str) -> bytes:
    raw = text.encode()
    if len(raw) < 127:
        return bytes([len(raw)]) + raw
    rest, length = len(raw) - 127, [127]
    while rest >= 128:
        length.append(rest % 128 + 128)
        rest //= 128
    return bytes([*length, rest]) + raw


def data(stream: int, payload: bytes, *, ends: bool = False) -> bytes:
    """A piece of a body."""
    return frame(DATA, END_STREAM if ends else 0, stream, payload)


def reset(stream: int) -> bytes:
    """The client does not want the answer any more."""
    return frame(RST_STREAM, 0, stream, _CANCEL)


async def connected(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection whose preface is sent."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(PREFACE + frame(SETTINGS, 0, 0))
    return reader, writer


def grpc_message(payload: bytes, *, compressed: bool = False) -> bytes:
    """A message as gRPC frames it."""
    return struct.pack(">BI", compressed, len(payload)) + payload
