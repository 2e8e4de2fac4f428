"""HTTP/2's frames (RFC 9113) as bytes: cut from what arrives, and made. Nothing here knows a connection."""

from __future__ import annotations

import struct
from collections.abc import Mapping

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = range(5)
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(5, 10)

END_STREAM = 0x1
ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITIZED = 0x20

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = range(1, 6)
MAX_HEADER_LIST_SIZE = 6
# From the range for experiments. Whoever does not know it ignores it (RFC 9113, 6.5.2).
SPEAKS_STREAMS = 0xF4D1

NO_ERROR = 0x0
PROTOCOL_ERROR = 0x1
INTERNAL_ERROR = 0x2
FLOW_CONTROL_ERROR = 0x3
STREAM_CLOSED = 0x5
FRAME_SIZE_ERROR = 0x6
REFUSED_STREAM = 0x7
CANCEL = 0x8
COMPRESSION_ERROR = 0x9
ENHANCE_YOUR_CALM = 0xB

DEFAULT_WINDOW = 65_535
DEFAULT_FRAME_BYTES = 16_384
MAX_WINDOW = 2**31 - 1
LARGEST_FRAME_BYTES = 2**24 - 1

_HEAD = struct.Struct(">HBBBI")
_SETTING = struct.Struct(">HI")
_NUMBER = struct.Struct(">I")
_TWO_NUMBERS = struct.Struct(">II")


class Violation(Exception):
    """The peer broke the protocol: the connection ends with this code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A whole frame."""
    size = len(payload)
    return _HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def head(kind: int, flags: int, stream: int, size: int) -> bytes:
    """The head of a frame whose payload has `size` bytes."""
    return _HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream)


def settings(values: Mapping[int, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join([_SETTING.pack(*pair) for pair in values.items()]))


def read_settings(payload: bytes) -> dict[int, int]:
    """The values of a SETTINGS frame; of one that comes twice the last."""
    if len(payload) % _SETTING.size:
        raise Violation(FRAME_SIZE_ERROR, "a SETTINGS frame has a part of a setting")
    return dict(_SETTING.iter_unpack(payload))


def window_update(stream: int, num_bytes: int) -> bytes:
    """A WINDOW_UPDATE frame; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream, _NUMBER.pack(num_bytes))


def reset(stream: int, code: int) -> bytes:
    """An RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream, _NUMBER.pack(code))


def goaway(last_stream: int, code: int, why: str = "") -> bytes:
    """A GOAWAY frame."""
    return frame(GOAWAY, 0, 0, _TWO_NUMBERS.pack(last_stream, code) + why.encode()[:256])


def read_number(payload: bytes, kind: str) -> int:
    """The one 32-bit number of a frame, without the reserved bit where a frame has one."""
    if len(payload) != _NUMBER.size:
        raise Violation(FRAME_SIZE_ERROR, f"a {kind} frame has {len(payload)} bytes")
    (number,) = _NUMBER.unpack(payload)
    return int(number)


def read_goaway(payload: bytes) -> tuple[int, int, str]:
    """Last stream, code and reason."""
    if len(payload) < _TWO_NUMBERS.size:
        raise Violation(FRAME_SIZE_ERROR, "a GOAWAY frame is too short")
    last, code = _TWO_NUMBERS.unpack_from(payload)
    return last & MAX_WINDOW, code, payload[8:264].decode("utf-8", "replace")


def unpadded(flags: int, payload: bytes) -> bytes:
    """The payload of a DATA or HEADERS frame without padding and priority."""
    if flags & PADDED:
        if not payload or payload[0] >= len(payload):
            raise Violation(PROTOCOL_ERROR, "a frame has more padding than payload")
        payload = payload[1 : len(payload) - payload[0]]
    return payload


class FrameCutter:
    """Cuts a byte stream into frames. Holds one incomplete frame at most; larger ones are a violation."""

    def __init__(self, max_frame_bytes: int) -> None:
        self._max = max_frame_bytes
        self._rest = bytearray()
        # Of `_rest`, before anything more can be cut from it.
        self._needed = HEAD_BYTES

    def feed(self, data: bytes) -> list[tuple[int, int, int, bytes]]:
        """(kind, flags, stream, payload) of each frame that `data` completes."""
        frames: list[tuple[int, int, int, bytes]] = []
        position, size = 0, len(data)
        while self._rest:
            # What has begun before is copied to its beginning, not what follows it.
            end = position + self._needed - len(self._rest)
            self._rest += data[position:end]
            if end > size:
                return frames
            position = end
            kind, flags, stream, length = self._read_head(self._rest, 0)
            if self._needed == HEAD_BYTES < HEAD_BYTES + length:
                self._needed = HEAD_BYTES + length
                continue
            frames.append((kind, flags, stream, bytes(self._rest[HEAD_BYTES:])))
            self._rest, self._needed = bytearray(), HEAD_BYTES
        while size - position >= HEAD_BYTES:
            kind, flags, stream, length = self._read_head(data, position)
            end = position + HEAD_BYTES + length
            if end > size:
                self._needed = HEAD_BYTES + length
                break
            frames.append((kind, flags, stream, data[position + HEAD_BYTES : end]))
            position = end
        self._rest = bytearray(data[position:])
        return frames

    def _read_head(self, data: bytes | bytearray, position: int) -> tuple[int, int, int, int]:
        high, low, kind, flags, stream = _HEAD.unpack_from(data, position)
        length = high << 8 | low
        if length > self._max:
            raise Violation(FRAME_SIZE_ERROR, f"a frame of {length} bytes; the limit is {self._max}")
        return kind, flags, stream & MAX_WINDOW, length
