"""One stream of an HTTP/2 connection: messages out as the windows allow, messages in, its two ends."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol

import grpc

from services.streams import frames
from services.streams.frames import Violation
from services.streams.messages import PREFIX_BYTES, Headers, MessageCutter, Pieces, StreamEnd, prefix

if TYPE_CHECKING:
    from services.streams.connection import Connection

# What the peer may send without being told that it was read. The event loop reads as long as there is
# something: of a large message no more at a time than takes about a millisecond.
STREAM_WINDOW = 512 * 1024
# Before more of a large message is asked for, so that others have most of the time: 64 MB/s.
_LARGE_PAUSE_S = 0.004


class Receiver(Protocol):
    """Who uses a stream. What it is told never waits; `ended` comes once, and nothing comes after it."""

    def headers_received(self, headers: dict[str, str]) -> None:
        """The peer's first headers; raises StreamEnd for what cannot be taken."""
        ...

    def message_received(self, message: bytes | Pieces) -> None:
        """One message; raises StreamEnd for what cannot be taken."""
        ...

    def ended(self, trailers: dict[str, str] | None) -> None:
        """The peer has ended its side, with trailers or without."""
        ...

    def failed(self, end: StreamEnd) -> None:
        """The stream is over, and not as it should be. Comes at most once, perhaps after `ended`."""
        ...

    def has_room(self) -> None:
        """The peer takes more again, after `is_congested`."""
        ...


class Stream:
    """One stream. Messages that the peer has no room for wait here; the sender looks at `is_congested`."""

    __slots__ = (
        "_connection",
        "_credit",
        "_cutter",
        "_held_bytes",
        "_num_sent",
        "_pause",
        "_pending",
        "_receive_window",
        "_send_window",
        "_trailers",
        "ended_here",
        "ended_there",
        "has_headers",
        "number",
        "receiver",
    )

    def __init__(self, connection: Connection, number: int, send_window: int, max_message_bytes: int) -> None:
        self.number = number
        self.receiver: Receiver | None = None
        self.has_headers = False
        self.ended_here = False
        self.ended_there = False
        self._connection = connection
        self._cutter = MessageCutter(max_message_bytes)
        self._send_window = send_window
        self._receive_window = STREAM_WINDOW
        # Received and not yet told to the peer as read.
        self._credit = 0
        # Until more of a large message is asked for.
        self._pause: asyncio.TimerHandle | None = None
        # Of messages that the receiver keeps.
        self._held_bytes = 0
        self._pending: deque[bytes] = deque()
        # Of the first of them.
        self._num_sent = 0
        # Trailers that end this side, once everything before them has been sent; empty for an end without.
        self._trailers: Headers | None = None

    @property
    def is_congested(self) -> bool:
        """Whether something waits for the peer. `has_room` says when nothing does any more."""
        return bool(self._pending) or self._connection.is_paused

    def send(self, message: bytes) -> None:
        """Sends a message as soon as the peer takes it; nothing happens on a stream that is over."""
        if self.ended_here:
            return
        size = len(message) + PREFIX_BYTES
        connection = self._connection
        if not self._pending and connection.takes(size) and size <= self._send_window:
            self._send_window -= size
            connection.spend(size)
            connection.write(frames.head(frames.DATA, 0, self.number, size) + prefix(len(message)) + message)
            return
        self._pending.append(prefix(len(message)) + message)
        self.pump()

    def send_headers(self, headers: Headers) -> None:
        """Headers before the first message."""
        self._connection.write_headers(self.number, headers, ends=False)

    def end(self, trailers: Headers = ()) -> None:
        """Ends this side, after what waits."""
        if not self.ended_here:
            self.ended_here = True
            self._trailers = trailers
            self.pump()

    def reset(self, code: int) -> None:
        """Ends both sides at once."""
        if self._connection.streams.get(self.number) is self:
            self._connection.write(frames.reset(self.number, code))
        self.drop()

    def drop(self) -> None:
        """Forgets the stream; nothing is sent or told any more."""
        self.ended_here = self.ended_there = True
        self._trailers = None
        self._pending.clear()
        self._num_sent = 0
        if self._pause is not None:
            self._pause.cancel()
        self.receiver = None
        self._connection.forget(self.number)

    def hold(self, num_bytes: int) -> None:
        """The receiver keeps a message of so many bytes."""
        self._held_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """The receiver has let go of it."""
        self._held_bytes -= num_bytes
        self._give_credit()

    # What the connection calls.

    def widen(self, num_bytes: int) -> None:
        """The peer takes so many more bytes (or fewer: its settings have changed)."""
        self._send_window += num_bytes
        if self._send_window > frames.MAX_WINDOW:
            raise Violation(frames.FLOW_CONTROL_ERROR, "a stream's window is too large")

    def pump(self) -> None:
        """Sends what the windows allow of what waits."""
        connection, pending = self._connection, self._pending
        while pending:
            room = min(connection.room(), self._send_window)
            if room <= 0:
                return
            message, begin = pending[0], self._num_sent
            end = min(len(message), begin + room)
            if end == len(message):
                pending.popleft()
                self._num_sent = 0
            else:
                self._num_sent = end
            self._send_window -= end - begin
            connection.spend(end - begin)
            connection.write(frames.frame(frames.DATA, 0, self.number, message[begin:end]))
        if self._trailers is not None:
            trailers, self._trailers = self._trailers, None
            if trailers:
                connection.write_headers(self.number, trailers, ends=True)
            else:
                connection.write(frames.frame(frames.DATA, frames.END_STREAM, self.number))
            if self.ended_there:
                connection.forget(self.number)
            elif connection.answers:
                # Nothing more that the client sends is of use.
                self.reset(frames.NO_ERROR)

    def has_room(self) -> None:
        """Tells the receiver, if nothing waits."""
        if not self.is_congested and self.receiver is not None:
            self.receiver.has_room()

    def take_data(self, data: bytes, num_bytes: int) -> None:
        """A DATA frame's payload; `num_bytes` with its padding. Raises StreamEnd."""
        self._receive_window -= num_bytes
        if self._receive_window < 0:
            raise Violation(frames.FLOW_CONTROL_ERROR, "a stream has sent more than its window")
        self._credit += num_bytes
        for message in self._cutter.feed(data):
            if self.receiver is not None:
                self.receiver.message_received(message)
        if not self._cutter.is_in_large:
            self._give_credit()
        elif self._pause is None and self._credit >= STREAM_WINDOW // 2:
            self._pause = asyncio.get_running_loop().call_later(_LARGE_PAUSE_S, self._go_on)

    def take_end(self, trailers: dict[str, str] | None) -> None:
        """The peer's side has ended. Raises StreamEnd in the middle of a message."""
        if not self._cutter.is_between:
            raise StreamEnd(grpc.StatusCode.INTERNAL, "the stream ended in the middle of a message")
        self.ended_there = True
        if self.receiver is not None:
            self.receiver.ended(trailers)
        if self.ended_here and self._trailers is None:
            self._connection.forget(self.number)

    def fail(self, end: StreamEnd) -> None:
        """The stream is over."""
        receiver = self.receiver
        self.drop()
        if receiver is not None:
            receiver.failed(end)

    def _go_on(self) -> None:
        self._pause = None
        self._give_credit()

    def _give_credit(self) -> None:
        if self._credit >= STREAM_WINDOW // 2 and self._held_bytes < STREAM_WINDOW and not self.ended_there:
            self._connection.write(frames.window_update(self.number, self._credit))
            self._receive_window += self._credit
            self._credit = 0
