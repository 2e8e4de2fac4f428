"""The core's end of the socket pair to the front, which carries frames of msgpack."""

from __future__ import annotations

import socket
import threading
from queue import Empty, Queue

import msgspec

from contract.frames import FrameBuffer, framed
from engine.core.messages import Command, Report

_CHUNK_BYTES = 1 << 20
# Chunks that wait for the core at most.
_MOST_PIECES = 64


class PeerGone(Exception):
    """The other side closed the socket."""


def encode(message: Command | Report) -> bytes:
    """The frame of a message."""
    return framed(msgspec.msgpack.encode(message))


class CoreSocket:
    """The core's end. A thread reads, also while a step is computed: the socket holds a few long prompts, and
    who stands behind them would wait for one step more each time that it is full. It has the interpreter for
    moments only, as messages are decoded by whoever receives them.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = FrameBuffer()
        self._decoder = msgspec.msgpack.Decoder(Command)
        # Pieces as they came; an empty one is the end. Where nobody takes them, the front's own limit holds.
        self._pieces: Queue[bytes] = Queue(_MOST_PIECES)
        threading.Thread(target=self._read, name="read-commands", daemon=True).start()

    def _read(self) -> None:
        data = b"?"
        while data:
            try:
                data = self._socket.recv(_CHUNK_BYTES)
            except OSError:
                data = b""
            self._pieces.put(data)

    def receive(self, timeout_s: float) -> list[Command]:
        """Messages that are there, waiting up to `timeout_s` for the first piece. Raises PeerGone at
        the end.
        """
        messages: list[Command] = []
        try:
            data = self._pieces.get(timeout_s > 0, timeout_s)
            while data:
                messages += [self._decoder.decode(payload) for payload in self._buffer.feed(data)]
                data = self._pieces.get_nowait()
        except Empty:
            return messages
        self._pieces.put(data)
        if not messages:
            raise PeerGone
        return messages

    def send(self, message: Report) -> None:
        """Writes one message. Raises PeerGone when nobody reads any more."""
        try:
            self._socket.sendall(encode(message))
        except ConnectionError as error:
            raise PeerGone from error
