"""One connection of the HTTP face: uvicorn's, with bounds on what nobody upstream has judged yet.

uvicorn parses (httptools), frames answers, keeps connections and asks the application. It has no limit on a
request's head, takes trailers for headers, takes the body of a request that would switch protocols for the
next request, reads on behind a row of requests that wait, refuses in plain text, and sends chunks to clients
that know none.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from contract.errors import MillraceError, Reason
from gateway.http.exchange import encoded
from gateway.types.error_form import ErrorForms

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application, Scope

# More than the edge lets through, with what it adds; exceeded by one read of the socket at most.
_HEAD_LIMIT_BYTES = 128 * 1024


class _Flow(FlowControl):
    """Reads nothing more while requests that have come already wait for their turn."""

    def __init__(self, transport: asyncio.Transport, waiting: deque[Any]) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if not self._waiting:
            super().resume_reading()


async def _unframed(cycle: RequestResponseCycle, app: Any, scope: Scope, receive: Any, send: Any) -> None:
    """Answers a client of HTTP/1.0, which knows no chunks: a stream is as long as its connection."""

    async def send_unframed(message: dict[str, Any]) -> None:
        cycle.chunked_encoding = False
        # uvicorn holds a body without chunks against a length, which a stream does not have.
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_unframed)


class _FaultyFraming(Exception):
    """Where a request ends is uncertain."""


class Connection(HttpToolsProtocol):
    """uvicorn's connection with bounded heads and rows of requests, and refusals in the form of the path."""

    _in_head = False
    # Since a head, a piece of a body or a request was complete.
    _num_pending_bytes = 0
    # Nothing more is read.
    _refused = False
    # The request that is being answered; those behind it wait in the pipeline.
    _active: RequestResponseCycle | None = None
    # The target of the newest request, as far as it came.
    url = b""

    # The bytes belong to the protocol that it was switched to.
    _switched = False

    def __init__(
        self, *args: Any, error_forms: ErrorForms, socket_paths: Collection[str] = (), **options: Any
    ) -> None:
        """See HttpToolsProtocol; at `socket_paths` WebSockets are opened."""
        super().__init__(*args, **options)
        self._error_forms = error_forms
        self._socket_paths = socket_paths

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self.flow = _Flow(self.transport, self.pipeline)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol. uvicorn tells the newest request alone, and keeps its timer after a reset."""
        super().connection_lost(exc)
        timer, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        if timer is not None:
            timer.cancel()
        self.pipeline.clear()
        active, self._active = self._active, None
        if active is not None and not active.response_complete:
            active.disconnected = True
            active.message_event.set()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._refused:
            return
        self._unset_keepalive_if_required()
        self._num_pending_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserCallbackError as error:
            # The callbacks that fail by what a client sends: one checks the framing, one splits the target.
            framing = isinstance(error.__context__, _FaultyFraming)
            self._refuse(_no_http(str(error.__context__) if framing else "its target is no path"))
        except httptools.HttpParserError as error:
            self._refuse(_no_http(str(error)))
        if self._num_pending_bytes > _HEAD_LIMIT_BYTES and not self._switched:
            self._refuse(
                MillraceError(
                    Reason.REQUEST_TOO_LARGE,
                    f"the request's headers are larger than {_HEAD_LIMIT_BYTES} bytes; send less",
                    metadata={"limit_bytes": str(_HEAD_LIMIT_BYTES)},
                )
            )

    def _parse(self, data: bytes) -> None:
        """Requests are answered in the protocol that they came in, whatever other they would switch to, but
        for WebSockets where there are any.
        """
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as switch:
                method = self.parser.get_method()
                if method == b"CONNECT":
                    raise httptools.HttpParserError("CONNECT asks for a proxy") from switch
                if method == b"GET" and self._opens_socket():
                    self._switch(data[switch.args[0] :])
                    return
                # The parser takes what follows for another protocol's, the request's body too: it is parsed
                # again without the header that says so.
                lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
                lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
                head = b"\r\n".join(lines) + b"\r\n\r\n"
                data = head + data[switch.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            else:
                return

    def _opens_socket(self) -> bool:
        """Whether a request that would switch protocols opens a WebSocket: nothing goes on before it, and it
        has no body, whose end another server on the way may see elsewhere.
        """
        if self._active is not None and not self._active.response_complete:
            return False
        path = self.url.partition(b"?")[0].decode("latin-1")
        names = {name for name, _ in self.headers}
        return (
            path in self._socket_paths
            and self._get_upgrade() == b"websocket"
            and not names & {b"content-length", b"transfer-encoding"}
        )

    def _switch(self, behind: bytes) -> None:
        """Gives the connection to a WebSocket, with what came behind its handshake."""
        self._switched = self._refused = True
        self.connections.discard(self)
        head = [b"GET %b HTTP/1.1" % self.url, *[b"%b: %b" % header for header in self.headers]]
        assert self.ws_protocol_class is not None, "paths of sockets come with their protocol"
        wire = self.ws_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.app_state
        )
        self.transport.set_protocol(wire)
        wire.connection_made(self.transport)
        for piece in (b"\r\n".join(head) + b"\r\n\r\n", behind):
            wire.data_received(piece)  # type: ignore[attr-defined]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = partial(_unframed, cycle, app)
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        """A request's first byte."""
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header. Trailers, which nobody upstream has judged, are dropped."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is over."""
        if self.parser.should_upgrade():
            return
        version = self.parser.get_http_version()
        if version != "1.1" and any(name == b"transfer-encoding" for name, _ in self.headers):
            # RFC 9112, 6.1: another server on the way may have seen another end of it.
            raise _FaultyFraming(f"HTTP/{version} has no transfer-encoding; send a content-length")
        self._in_head = False
        self._num_pending_bytes = 0
        super().on_headers_complete()
        if not self.pipeline:
            self._active = self.cycle

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._num_pending_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        if self.parser.should_upgrade():
            return
        self._num_pending_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is over."""
        self._active = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()

    def _refuse(self, error: MillraceError) -> None:
        """Answers what cannot be read on with, behind the answers that are due before it."""
        self._refused = True
        cycle = self.cycle
        whole = cycle is not None and not cycle.more_body
        if cycle is not None and whole and not cycle.response_complete:
            # Answers come in order, and after the last one nothing can be read.
            cycle.keep_alive = False
            return
        if not self.pipeline and (cycle is None or whole or not cycle.response_started):
            form = self._error_forms.of(self.url.decode("latin-1"))
            body, status = form.body(error), form.status(error)
            headers = b"".join([b"%b: %b\r\n" % header for header in encoded(form.headers(error))])
            self.transport.write(
                b"HTTP/1.1 %d \r\n%bcontent-length: %d\r\nconnection: close\r\n\r\n%b"
                % (status, headers, len(body), body)
            )
        # Whoever reads the body that broke off learns that the client is gone.
        self.transport.close()


def _no_http(problem: str) -> MillraceError:
    return MillraceError(Reason.MALFORMED_BODY, f"the request is not valid HTTP/1.1: {problem}")
