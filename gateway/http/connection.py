"""One connection of the HTTP face: uvicorn's, with bounds on what nobody upstream has judged yet.

uvicorn parses (httptools), frames answers, keeps connections and asks the application. It has no limit on a
request's head, takes trailers for headers, reads on behind a row of requests that wait, refuses in plain
text, and writes an answer's head and body apart.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from contract.errors import MillraceError, Reason
from gateway.openai_error import error_body

# What is written in one turn of the event loop goes out together, unless it is more than this.
_FLUSH_BYTES = 65536
# More than the edge lets through, with what it adds; exceeded by one read of the socket at most.
_HEAD_LIMIT_BYTES = 128 * 1024


class JoiningTransport:
    """Writes once a turn of the event loop.

    Each call of the system costs this side, and Envoy, which it wakes, more than most answers do.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._unsent: list[bytes] = []
        self._num_unsent_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """See asyncio.WriteTransport."""
        if not self._unsent:
            self._loop.call_soon(self.flush)
        self._unsent.append(data)
        self._num_unsent_bytes += len(data)
        if self._num_unsent_bytes > _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what waits for the end of the turn."""
        unsent, self._unsent, self._num_unsent_bytes = self._unsent, [], 0
        if unsent and not self._transport.is_closing():
            self._transport.write(unsent[0] if len(unsent) == 1 else b"".join(unsent))

    def close(self) -> None:
        """See asyncio.BaseTransport."""
        self.flush()
        self._transport.close()


class _Flow(FlowControl):
    """Reads nothing more while requests that have come already wait for their turn."""

    def __init__(self, transport: asyncio.Transport, waiting: deque[Any]) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if not self._waiting:
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """uvicorn's connection with bounded heads and rows of requests, and refusals in OpenAI's form."""

    _in_head = False
    # Since a head, a piece of a body or a request was complete.
    _num_pending_bytes = 0
    # Nothing more is read.
    _refused = False
    # The request that is being answered; those behind it wait in the pipeline.
    _active: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(cast(asyncio.Transport, JoiningTransport(transport, self.loop)))
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
        self._num_pending_bytes += len(data)
        super().data_received(data)
        if self._num_pending_bytes > _HEAD_LIMIT_BYTES:
            self._refuse(
                MillraceError(
                    Reason.REQUEST_TOO_LARGE,
                    f"the request's headers are larger than {_HEAD_LIMIT_BYTES} bytes; send less",
                    metadata={"limit_bytes": str(_HEAD_LIMIT_BYTES)},
                )
            )

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
        self._num_pending_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is over. It goes at once: what the handler does next is nothing to wait for."""
        cast(JoiningTransport, self.transport).flush()
        self._active = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuses what is not HTTP."""
        self._refuse(MillraceError(Reason.MALFORMED_BODY, "the request is not valid HTTP/1.1"))

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
            body = error_body(error)
            status = error.mapping.http_status
            self.transport.write(
                b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%b" % (status, len(body), body)
            )
        # Whoever reads the body that broke off learns that the client is gone.
        self.transport.close()
