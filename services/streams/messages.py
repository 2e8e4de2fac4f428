"""gRPC inside a stream: messages with their length in front, and how a call ends. HTTP/2 is elsewhere."""

from __future__ import annotations

import base64
import binascii
import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote, unquote

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2

from contract.proto.status import from_code, from_status
from services.errors import MillraceError, Reason

Headers: TypeAlias = "Sequence[tuple[str, str]]"

AnyMessage = TypeVar("AnyMessage", bound=Message)
Parse = TypeVar("Parse", bound=Callable[..., Any])

PREFIX_BYTES = 5
_PREFIX = struct.Struct(">BI")
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_DETAILS = "grpc-status-details-bin"
# What fits into any peer's headers; gRPC's own refuses more than 8 KiB.
_MAX_DETAILS_BYTES = 6 * 1024
_MAX_MESSAGE_CHARACTERS = 1024
# Printable ASCII without the percent sign goes as it is.
_LITERAL = "".join(chr(number) for number in range(0x20, 0x7F) if number != ord("%"))
# gRPC's table for answers that are not gRPC's.
_CODE_OF_HTTP = {
    400: grpc.StatusCode.INTERNAL,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.UNIMPLEMENTED,
    429: grpc.StatusCode.UNAVAILABLE,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.UNAVAILABLE,
}
# Of an incomplete message smaller pieces than this are put together as they come.
_PIECE_BYTES = 8 * 1024
# Larger messages are not put together, unless they have come in one frame.
_WHOLE_BYTES = 256 * 1024
_MAX_TOGETHER = 8
_MAX_TOGETHER_BYTES = 256 * 1024
_TAKE_PIECES: set[Callable[..., Any]] = set()
_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


class StreamEnd(Exception):
    """How a stream ended, as gRPC says it. `rich` is a serialized google.rpc.Status, or empty."""

    def __init__(self, code: grpc.StatusCode, details: str = "", rich: bytes = b"") -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details
        self.rich = rich

    def error(self, unavailable: Reason) -> MillraceError:
        """The domain error; `unavailable` names the peer that could not be reached."""
        if self.rich:
            try:
                return from_status(status_pb2.Status.FromString(self.rich))
            except DecodeError:
                pass
        return from_code(self.code, self.details, unavailable=unavailable)


def prefix(size: int) -> bytes:
    """What stands before a message of `size` bytes."""
    return _PREFIX.pack(0, size)


class Pieces:
    """A large message as it came: to put megabytes together would hold up everybody else for milliseconds.

    Slices are views, `bytes` a copy.
    """

    __slots__ = ("_ends", "parts")

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self.parts = parts
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)

    def __getitem__(self, span: slice) -> Pieces:
        begin, end, _ = span.indices(len(self))
        parts = []
        index = bisect_right(self._ends, begin)
        while begin < end:
            part, part_end = self.parts[index], self._ends[index]
            part_begin, stop = part_end - len(part), min(end, part_end)
            parts.append(part[begin - part_begin : stop - part_begin])
            begin = stop
            index += 1
        return Pieces(parts)


def takes_pieces(parse: Parse) -> Parse:
    """Marks a request's deserializer that takes `Pieces` as well."""
    _TAKE_PIECES.add(parse)
    return parse


def parser(parse: Callable[[bytes], Any]) -> Callable[[bytes | Pieces], Any]:
    """The deserializer for messages as they come."""
    if parse in _TAKE_PIECES:
        takes_all: Callable[..., Any] = parse
        return takes_all
    # Of bytes that is no copy.
    return lambda message: parse(bytes(message))


class MessageCutter:
    """Cuts a stream's bytes into messages; one that is too large is refused before it is kept."""

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        # Of a message whose prefix is complete: its size and its content so far. Else of its prefix.
        self._size: int | None = None
        self._rest: list[bytes] = []
        self._num_rest_bytes = 0

    @property
    def is_between(self) -> bool:
        """Whether no message has begun."""
        return self._size is None and not self._rest

    @property
    def is_in_large(self) -> bool:
        """Whether a large message has begun, and is not complete."""
        return self._size is not None and self._size > _WHOLE_BYTES

    def feed(self, data: bytes) -> list[bytes | Pieces]:
        """The messages that `data` completes, large ones in pieces. Raises StreamEnd for one that cannot be
        taken.
        """
        messages: list[bytes | Pieces] = []
        position = 0
        if self._size is not None:
            position = self._size - self._num_rest_bytes
            if position > len(data):
                self._keep(data)
                return messages
            is_large = self._size > _WHOLE_BYTES
            parts = (*self._taken(), data[:position])
            messages.append(Pieces([memoryview(each) for each in parts]) if is_large else b"".join(parts))
        elif self._rest:
            data = b"".join((*self._taken(), data))
        size = len(data)
        while size - position >= PREFIX_BYTES:
            flag, length = _PREFIX.unpack_from(data, position)
            if flag:
                raise StreamEnd(grpc.StatusCode.UNIMPLEMENTED, "compressed messages are not taken here")
            if length > self._max:
                raise StreamEnd(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"a message of {length} bytes is larger than the limit of {self._max}",
                )
            position += PREFIX_BYTES
            if length > size - position:
                self._size = length
                break
            messages.append(data[position : position + length])
            position += length
        if position < size:
            self._keep(data[position:])
        return messages

    def _keep(self, data: bytes) -> None:
        if self._rest and len(self._rest[-1]) + len(data) <= _PIECE_BYTES:
            # A peer that sends byte by byte must not make this side keep an object for each.
            self._rest[-1] += data
        else:
            self._rest.append(data)
        self._num_rest_bytes += len(data)

    def _taken(self) -> list[bytes]:
        rest, self._rest, self._num_rest_bytes, self._size = self._rest, [], 0, None
        return rest


def taken_together(waiting: deque[AnyMessage]) -> list[AnyMessage]:
    """Takes from the left what goes into one message: few, so that the peer need not wait for the last to
    begin the first, and no more bytes than would hold others up.
    """
    taken = [waiting.popleft()]
    if waiting:
        num_bytes = taken[0].ByteSize()
        while waiting and len(taken) < _MAX_TOGETHER:
            num_bytes += waiting[0].ByteSize()
            if num_bytes > _MAX_TOGETHER_BYTES:
                break
            taken.append(waiting.popleft())
    return taken


def to_trailers(end: StreamEnd) -> list[tuple[str, str]]:
    """The trailers that say how a call ended. Details that no peer would take are left out."""
    trailers = [("grpc-status", str(end.code.value[0]))]
    if end.details:
        trailers.append(("grpc-message", quote(end.details[:_MAX_MESSAGE_CHARACTERS], safe=_LITERAL)))
    if end.rich and len(end.rich) <= _MAX_DETAILS_BYTES:
        trailers.append((_DETAILS, base64.b64encode(end.rich).decode().rstrip("=")))
    return trailers


def from_trailers(trailers: Mapping[str, str]) -> StreamEnd:
    """Inverse of to_trailers; UNKNOWN where there is no status."""
    number = trailers.get("grpc-status", "")
    code = _CODES.get(int(number), grpc.StatusCode.UNKNOWN) if number.isdecimal() else grpc.StatusCode.UNKNOWN
    details = unquote(trailers.get("grpc-message", "")) or (
        "" if number else "the stream ended without a status"
    )
    return StreamEnd(code, details, _binary(trailers.get(_DETAILS, "")))


def _binary(text: str) -> bytes:
    text = text.partition(",")[0]
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        return b""


def from_http_status(status: str) -> StreamEnd:
    """How a call ends that something other than a gRPC server has answered."""
    code = _CODE_OF_HTTP.get(int(status) if status.isdecimal() else 0, grpc.StatusCode.UNKNOWN)
    return StreamEnd(code, f"the peer answered with HTTP status {status[:16] or '(none)'}")


def timeout_s(text: str) -> float | None:
    """Seconds of a grpc-timeout header; None for none, or for what is no timeout."""
    unit, number = _SECONDS.get(text[-1:]), text[:-1]
    if unit is None or not number.isdecimal() or len(number) > 8:
        return None
    return int(number) * unit
