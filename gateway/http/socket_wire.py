"""One WebSocket as bytes: uvicorn's over wsproto, with bounds on what comes, and refusals that arrive.

uvicorn frames, answers pings and closes, and pings itself, so that nobody on the way takes a silent socket
for a dead one. It holds a message until it is whole without counting it, and closes at once behind what it
refuses: the kernel resets a connection with bytes that nobody has read, and the reason would be lost with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from uvicorn.protocols.websockets.wsproto_impl import WSProtocol
from wsproto import events
from wsproto.utilities import RemoteProtocolError

from contract.errors import MillraceError, Reason
from gateway.intake.intake import LARGE_BYTES, ByteLease

# Close codes of RFC 6455, 7.4.1, and of its registry.
NORMAL, POLICY, TOO_LARGE, RESTARTS, TRY_LATER = 1000, 1008, 1009, 1012, 1013
# Frames of one read: those of a client that means well are larger. Each costs the event loop that all share.
_MAX_FRAMES = 256
# Key of the ASGI scope's state under which the wire stands.
WIRE = "wire"


class _TooManyFrames(Exception):
    """More than a client that means well sends at once."""


class SocketWire(WSProtocol):
    """The connection; `SocketSession` sets `lease` and `frame_of` once it knows who is there."""

    lease: Callable[[], ByteLease] | None = None
    frame_of: Callable[[MillraceError], bytes] | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        """See WSProtocol."""
        super().__init__(*args, **options)
        self._message = bytearray()
        self._num_frames = 0
        # Nothing of what comes is parsed any more.
        self._is_deaf = False
        # Somebody decides whether it is opened; what comes meanwhile.
        self._is_asked, self._early = False, b""
        # Of the message that comes, where it is large.
        self._held: ByteLease | None = None

    def handle_connect(self, event: events.Request) -> None:
        """The handshake."""
        super().handle_connect(event)
        self.scope["state"][WIRE] = self
        # wsproto loses what comes before it is accepted.
        self._is_asked = True
        self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._num_frames = 0
        if self._is_asked:
            self._early += data
        elif not self._is_deaf:
            self._guarded(super().data_received, data)

    async def send(self, message: Any) -> None:
        """See ASGI 3."""
        await super().send(message)
        if message["type"] == "websocket.accept" and not self.transport.is_closing():
            early, self._early, self._is_asked = self._early, b"", False
            self.transport.resume_reading()
            self.data_received(early)

    def _guarded(self, parse: Callable[..., None], *arguments: bytes) -> None:
        """uvicorn expects errors where bytes are taken; frames are parsed where they are read."""
        try:
            parse(*arguments)
        except RemoteProtocolError as error:
            if error.event_hint is not None and not self.transport.is_closing():
                self.transport.write(self.conn.send(error.event_hint))
            self.transport.close()
        except _TooManyFrames:
            self._is_deaf = True
            problem = f"more than {_MAX_FRAMES} frames came at once; send each message in one"
            self.refuse(MillraceError(Reason.MALFORMED_BODY, problem), POLICY)

    def _note_frame(self) -> None:
        self._num_frames += 1
        if self._num_frames > _MAX_FRAMES:
            raise _TooManyFrames

    def handle_ping(self, event: events.Ping) -> None:
        """Answers it."""
        self._note_frame()
        super().handle_ping(event)

    def handle_pong(self, event: events.Pong) -> None:
        """Nothing is due."""
        self._note_frame()

    def handle_message(self, event: events.TextMessage | events.BytesMessage) -> None:
        """A piece of a message, which is received with `data`, `is_text`, and the `lease` of its bytes."""
        self._note_frame()
        is_text = isinstance(event, events.TextMessage)
        piece = event.data.encode() if isinstance(event, events.TextMessage) else bytes(event.data)
        try:
            self._count(len(piece))
        except MillraceError as error:
            self.refuse(error, TOO_LARGE if error.reason is Reason.REQUEST_TOO_LARGE else TRY_LATER)
            return
        self._message += piece
        if not event.message_finished:
            return
        message: Any = {
            "type": "websocket.receive",
            "data": bytes(self._message),
            "is_text": is_text,
            "lease": self._held,
        }
        self._message, self._held = bytearray(), None
        self.queue.put_nowait(message)
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def _count(self, num_bytes: int) -> None:
        limit, in_all = self.config.ws_max_size, len(self._message) + num_bytes
        if in_all > limit:
            raise MillraceError(
                Reason.REQUEST_TOO_LARGE,
                f"the message is larger than the limit of {limit} bytes; send less",
                metadata={"limit_bytes": str(limit)},
            )
        if in_all > LARGE_BYTES and self.lease is not None:
            if self._held is None:
                self._held, num_bytes = self.lease(), in_all
            self._held.grow_by_body(num_bytes)

    def refuse(self, error: MillraceError, code: int) -> None:
        """Says what is wrong and closes; what follows of the client's is dropped until it closes as well."""
        self._drop()
        if self.close_sent or self.transport.is_closing():
            return
        self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": ""})
        if self.frame_of is not None:
            self.transport.write(self.conn.send(events.TextMessage(data=self.frame_of(error).decode())))
        self.transport.write(self.conn.send(events.CloseConnection(code=code, reason=error.message[:100])))
        self.close_timer = self.loop.call_later(self.close_timeout, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._drop()
        super().connection_lost(exc)

    def _drop(self) -> None:
        """Forgets what came of a message that will not be whole."""
        self._message = bytearray()
        if self._held is not None:
            self._held.release()
            self._held = None
