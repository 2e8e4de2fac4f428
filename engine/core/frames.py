"""Length-prefixed msgpack frames over the socket pair between front and core.

One frame is four bytes of length, little endian, and the message.
"""

from __future__ import annotations

import select
import socket
import struct

import msgspec

from engine.core.messages import Command, Report

_LENGTH = struct.Struct("<I")
_CHUNK_BYTES = 1 << 20


class PeerGone(Exception):
    """The other side closed the socket."""


def encode(message: Command | Report) -> bytes:
    """The frame of a message."""
    payload = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(payload)) + payload


class FrameBuffer:
    """Cuts a byte stream into payloads."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that `data` completes."""
        self._buffer += data
        payloads: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            payloads.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return payloads


class CoreSocket:
    """The core's end: reads without blocking while there is work, and waits on the socket when idle."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = FrameBuffer()
        self._decoder = msgspec.msgpack.Decoder(Command)

    def receive(self, timeout_s: float) -> list[Command]:
        """Messages that are there, waiting up to `timeout_s` for the first. Raises PeerGone at the end."""
        if timeout_s > 0:
            select.select([self._socket], [], [], timeout_s)
        messages: list[Command] = []
        while True:
            try:
                data = self._socket.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            except ConnectionError as error:
                raise PeerGone from error
            if not data:
                raise PeerGone
            messages += [self._decoder.decode(payload) for payload in self._buffer.feed(data)]
            if len(data) < _CHUNK_BYTES:
                # That was all; what comes now is read in the next turn.
                return messages

    def send(self, message: Report) -> None:
        """Writes one message. Raises PeerGone when nobody reads any more."""
        try:
            self._socket.sendall(encode(message))
        except ConnectionError as error:
            raise PeerGone from error
