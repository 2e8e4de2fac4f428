"""How messages are told apart on a socket between two processes of the suite: four bytes of length, little
endian, then the message. The engine's front and core, and the tokenizer service and its workers, send such
frames.

The standard library alone is used here, because vLLM's interpreter, which lacks the suite, imports this file.
"""

from __future__ import annotations

import struct
from io import BufferedIOBase, RawIOBase

_HEADER = struct.Struct("<I")
HEADER_BYTES = _HEADER.size


def header(num_bytes: int) -> bytes:
    """What is sent before a message of so many bytes."""
    return _HEADER.pack(num_bytes)


def message_bytes(start: bytes | bytearray, offset: int = 0) -> int:
    """Length of the message whose header stands at `offset`."""
    size: int = _HEADER.unpack_from(start, offset)[0]
    return size


def framed(message: bytes) -> bytes:
    """A message with its header."""
    return header(len(message)) + message


class FrameBuffer:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes."""
        self._buffer += data
        messages: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= HEADER_BYTES:
            end = start + HEADER_BYTES + message_bytes(self._buffer, start)
            if len(self._buffer) < end:
                break
            messages.append(bytes(self._buffer[start + HEADER_BYTES : end]))
            start = end
        del self._buffer[:start]
        return messages


def read_frame(stream: BufferedIOBase | RawIOBase) -> bytearray | None:
    """Waits for the next message of a blocking stream; None at its end."""
    start = _read(stream, HEADER_BYTES)
    return None if start is None else _read(stream, message_bytes(start))


def _read(stream: BufferedIOBase | RawIOBase, num_bytes: int) -> bytearray | None:
    """So many bytes; None where the stream ends before."""
    found = bytearray(num_bytes)
    rest = memoryview(found)
    while rest:
        num_read = stream.readinto(rest)
        if not num_read:
            return None
        rest = rest[num_read:]
    return found
