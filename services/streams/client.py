"""Opens one bidirectional call on a connection of its own. The peer may be any gRPC server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc

from services import tls
from services.channels import MAX_MESSAGE_BYTES
from services.errors import MillraceError, Reason
from services.streams import frames
from services.streams.connection import Connection
from services.streams.messages import Headers, Pieces, StreamEnd, from_http_status, from_trailers
from services.streams.stream import Stream

_log = logging.getLogger(__name__)

# How long one attempt to connect may take, as for gRPC's channels.
_CONNECT_S = 2.0


class ClientStream:
    """One call. `on_message` is called with every message, `on_end` once, with what went wrong or None.

    Both are called from the event loop and never wait. What `on_message` raises ends the call with it.
    """

    def __init__(
        self,
        connection: _ClientConnection,
        on_message: Callable[[bytes], None],
        on_end: Callable[[MillraceError | None], None],
        unavailable: Reason,
        on_room: Callable[[], None] | None = None,
    ) -> None:
        self._connection = connection
        self._stream: Stream = connection.stream
        self._stream.receiver = self
        self._on_message = on_message
        self._on_end: Callable[[MillraceError | None], None] | None = on_end
        self._on_room = on_room
        self._unavailable = unavailable

    @property
    def is_congested(self) -> bool:
        """Whether the peer does not take what was sent; `on_room` is called when it does again."""
        return self._stream.is_congested

    def send(self, message: bytes) -> None:
        """Sends a message, or keeps it while the peer takes none."""
        self._stream.send(message)

    def end(self) -> None:
        """Says that nothing more is sent; the peer's messages still come."""
        self._stream.end()

    def cancel(self) -> None:
        """Gives the call up; `on_end` is not called any more."""
        self._on_end = None
        self._stream.reset(frames.CANCEL)
        self._connection.close()

    # What the stream calls.

    def headers_received(self, headers: dict[str, str]) -> None:
        """See Receiver."""
        if headers.get(":status") != "200":
            raise from_http_status(headers.get(":status", ""))
        if not headers.get("content-type", "").startswith("application/grpc"):
            raise StreamEnd(grpc.StatusCode.UNKNOWN, "the peer's answer is not gRPC")

    def message_received(self, message: bytes | Pieces) -> None:
        """See Receiver."""
        if self._on_end is None:
            return
        try:
            self._on_message(bytes(message))
        except MillraceError as error:
            self._finish(error)
        except Exception:
            _log.exception("a message from a stream could not be handled")
            self._finish(MillraceError(Reason.INTERNAL, "the stream broke; the log has the details"))

    def ended(self, trailers: dict[str, str] | None) -> None:
        """See Receiver."""
        end = from_trailers(trailers or {})
        self._finish(None if end.code is grpc.StatusCode.OK else end.error(self._unavailable))

    def failed(self, end: StreamEnd) -> None:
        """See Receiver."""
        self._finish(end.error(self._unavailable))

    def has_room(self) -> None:
        """See Receiver."""
        if self._on_room is not None:
            self._on_room()

    def _finish(self, error: MillraceError | None) -> None:
        on_end, self._on_end = self._on_end, None
        self._stream.reset(frames.CANCEL if error else frames.NO_ERROR)
        self._connection.close()
        if on_end is not None:
            on_end(error)


class _ClientConnection(Connection):
    """The client's side: one stream."""

    def __init__(self, max_message_bytes: int) -> None:
        super().__init__(
            {frames.ENABLE_PUSH: 0, frames.SPEAKS_STREAMS: 1},
            max_message_bytes,
        )
        self.stream = self.new_stream(1)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._is_reading = True
        self.write(frames.PREFACE)
        super().connection_made(transport)
        self._is_reading = False
        self._flush()

    def may_open(self, number: int) -> bool:
        """See Connection."""
        return False

    def was_open(self, number: int) -> bool:
        """See Connection."""
        return number == self.stream.number

    def begin(self, stream: Stream, headers: dict[str, str]) -> None:
        """See Connection."""
        if stream.receiver is not None:
            stream.receiver.headers_received(headers)

    def refuse(self, stream: Stream, end: StreamEnd) -> None:
        """See Connection."""
        stream.fail(end)

    def went_away(self, last_stream: int, code: int, why: str) -> None:
        """See Connection."""
        if last_stream < self.stream.number or code != frames.NO_ERROR:
            details = f"the peer closes the connection with code {code} {why}".strip()
            self.stream.fail(StreamEnd(grpc.StatusCode.UNAVAILABLE, details))


async def open_stream(
    target: str,
    method: str,
    *,
    on_message: Callable[[bytes], None],
    on_end: Callable[[MillraceError | None], None],
    on_room: Callable[[], None] | None = None,
    metadata: Headers = (),
    unavailable: Reason = Reason.INTERNAL,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> ClientStream:
    """Connects to `target` (host:port or unix:path) and begins a call of `method`, "/package.Service/Method".

    With TLS where the process uses it. Raises MillraceError with `unavailable` when nobody answers.
    """
    try:
        async with asyncio.timeout(_CONNECT_S):
            connection = await _connect(target, max_message_bytes)
    except TimeoutError as error:
        raise _unreachable(target, f"no connection within {_CONNECT_S:g} s", unavailable) from error
    except OSError as error:
        raise _unreachable(target, str(error), unavailable) from error
    if connection.is_closed or connection.stream.ended_here:
        # A peer that closes may say so before this task runs, when nobody was there to be told.
        connection.close()
        raise _unreachable(target, "the peer ended the connection at once", unavailable)
    call = ClientStream(connection, on_message, on_end, unavailable, on_room)
    connection.stream.send_headers(
        [
            (":method", "POST"),
            (":scheme", "http" if tls.current() is None else "https"),
            (":path", method),
            (":authority", target.partition(":")[2] if target.startswith("unix:") else target),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("user-agent", "millrace-streams"),
            *metadata,
        ]
    )
    return call


async def _connect(target: str, max_message_bytes: int) -> _ClientConnection:
    loop = asyncio.get_running_loop()
    secure = tls.current()
    context = None if secure is None else secure.client_context("h2")
    name = None if secure is None else secure.security.tls_name

    def make() -> _ClientConnection:
        return _ClientConnection(max_message_bytes)

    if target.startswith("unix:"):
        path = target.removeprefix("unix:").removeprefix("//")
        _, connection = await loop.create_unix_connection(make, path, ssl=context, server_hostname=name)
        return connection
    host, _, port = target.removeprefix("dns:").rpartition("/")[2].rpartition(":")
    if not port.isdecimal():
        raise OSError(f"{target!r} is not host:port")
    _, connection = await loop.create_connection(
        make, host.strip("[]"), int(port), ssl=context, server_hostname=name
    )
    return connection


def _unreachable(target: str, why: str, unavailable: Reason) -> MillraceError:
    return MillraceError(unavailable, f"failed to connect to {target}: {why}", retry_after_s=1.0)
