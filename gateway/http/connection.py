"""One connection of the HTTP face: HTTP/1.1 parsed by httptools, requests served one after the other.

The generating endpoints answer a thousand requests a second beside everything else that a core does for them;
what a general server does per request (a task that waits for the disconnection, messages for every piece)
would cost as much as the request itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeAlias, cast
from urllib.parse import unquote_to_bytes

import httptools

from gateway.auth.callers import HttpCallers
from gateway.http.exchange import Exchange
from services.errors import MillraceError, Reason

_log = logging.getLogger(__name__)

# Answers an exchange at once, or returns what does.
Handler: TypeAlias = Callable[[Exchange], "Coroutine[Any, Any, None] | None"]

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# What is written in one turn of the event loop goes out together, unless it is more than this.
_FLUSH_BYTES = 65536
# More than the edge lets through, with what it adds; exceeded by one read of the socket at most.
_HEAD_LIMIT_BYTES = 128 * 1024
# Larger bodies, and those of unknown length, are only taken from callers who have been identified.
_ANYBODYS_BYTES = 64 * 1024
# How long the rest of a body that is too large is read and dropped. Closing at once would make the kernel
# reset the connection, and the answer would be lost with it.
_LINGER_S = 5.0


class Connection(asyncio.Protocol):
    """Parses requests and calls the handler for each when its body is complete, in order, one at a time."""

    def __init__(
        self,
        handler: Handler,
        body_limit: int,
        connections: set[Connection],
        callers: HttpCallers | None = None,
    ) -> None:
        self._handler = handler
        self._callers = callers
        self._body_limit = body_limit
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        # Being read.
        self._incoming: Exchange | None = None
        self._url = b""
        self._in_head = False
        self._num_head_bytes = 0
        # The body being read belongs to a request that is answered already.
        self._dropping = False
        self._lingering = False
        # Being answered, and read already meanwhile.
        self._active: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        # Written in this turn of the event loop. Each call of the system costs this side, and Envoy, which it
        # wakes, more than most answers do.
        self._unsent: list[bytes] = []
        self._num_unsent_bytes = 0
        # Set while the client takes less than is written.
        self._congested: asyncio.Future[None] | None = None
        self._closing = False

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self._active is None and not self._tasks

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._transport = None
        self._connections.discard(self)
        self.resume_writing()
        self._waiting.clear()
        active, self._active = self._active, None
        if active is not None and not active.ended:
            active.note_gone()
        # It holds this object's methods; both would stay until the garbage collector comes by.
        del self._parser

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._closing:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # No other protocol is spoken here; the request itself is answered, what follows is not HTTP.
            self._closing = True
            self.close()
        except httptools.HttpParserError as error:
            self._refuse(MillraceError(Reason.MALFORMED_BODY, f"the request is not valid HTTP/1.1: {error}"))
        else:
            if self._in_head:
                self._bound_head(len(data))

    def _bound_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > _HEAD_LIMIT_BYTES:
            self._refuse(
                MillraceError(
                    Reason.REQUEST_TOO_LARGE,
                    f"the request's headers are larger than {_HEAD_LIMIT_BYTES} bytes; send less",
                    metadata={"limit_bytes": str(_HEAD_LIMIT_BYTES)},
                )
            )

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self._congested = self._loop.create_future()

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        congested, self._congested = self._congested, None
        if congested is not None and not congested.done():
            congested.set_result(None)

    # What the parser calls.

    def on_message_begin(self) -> None:
        """A request's first byte."""
        self._incoming = Exchange(self, self._body_limit)
        self._url = b""
        self._in_head = True
        self._num_head_bytes = 0

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header. Trailers, which nobody upstream has judged, are dropped."""
        if not self._in_head:
            return
        assert self._incoming is not None, "the parser begins a message first"
        self._incoming.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """The header is over; a client that waits to be told so is told to send its body."""
        exchange = self._incoming
        assert exchange is not None, "the parser begins a message first"
        self._in_head = False
        parser = self._parser
        exchange.method = parser.get_method().decode("ascii")
        exchange.path = _path(self._url)
        exchange.is_http_1_0 = parser.get_http_version() == "1.0"
        exchange.closes = not parser.should_keep_alive()
        headers = exchange.headers
        declared = headers.get(b"content-length", b"")
        waits = headers.get(b"expect", b"").lower() == b"100-continue"
        if declared.isdigit() and int(declared) > self._body_limit:
            exchange.num_body_bytes = int(declared)
            self._complete_early(exchange, body_follows=not waits)
        elif self._callers is not None and not _is_small(declared, headers) and self._is_nobody(exchange):
            self._complete_early(exchange, body_follows=not waits)
        elif waits:
            self.write(_CONTINUE)

    def _is_nobody(self, exchange: Exchange) -> bool:
        assert self._callers is not None, "the caller has looked"
        exchange.identify(self._callers)
        return exchange.caller is None

    def on_body(self, body: bytes) -> None:
        """A piece of the body. One that is too large is answered before all of it has come."""
        exchange = self._incoming
        if exchange is None:
            return
        exchange.add_body(body)
        if exchange.too_large:
            self._complete_early(exchange, body_follows=True)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._dropping = False
        if self._lingering:
            self._end()
        elif self._incoming is not None:
            self._complete(self._incoming)

    def _complete_early(self, exchange: Exchange, *, body_follows: bool) -> None:
        """Too large: the rest of the body is dropped, and the connection ends with the answer."""
        exchange.closes = True
        self._dropping = body_follows
        self._complete(exchange)

    def _complete(self, exchange: Exchange) -> None:
        self._incoming = None
        if self._closing:
            # Behind a request that ended the connection: nobody would read the answer.
            return
        if self._active is None:
            self._answer(exchange)
            return
        self._waiting.append(exchange)
        if self._transport is not None:
            self._transport.pause_reading()

    def _answer(self, exchange: Exchange) -> None:
        self._active = exchange
        answering = self._handler(exchange)
        if answering is not None:
            task = self._loop.create_task(self._run(exchange, answering))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, exchange: Exchange, answering: Coroutine[Any, Any, None]) -> None:
        try:
            await answering
        finally:
            if not exchange.ended and self._transport is not None:
                # The answer broke off: only the connection's end can say so.
                self._end()

    # What exchanges and the server call.

    def write(self, data: bytes) -> None:
        """See Wire."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(data)
        self._num_unsent_bytes += len(data)
        if self._num_unsent_bytes > _FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        unsent, self._unsent, self._num_unsent_bytes = self._unsent, [], 0
        if unsent and self._transport is not None:
            self._transport.write(unsent[0] if len(unsent) == 1 else b"".join(unsent))

    async def drained(self) -> None:
        """See Wire."""
        if self._congested is not None:
            await self._congested

    def response_ended(self, exchange: Exchange) -> None:
        """See Wire. Goes on to the next request, or ends the connection."""
        # At once: what the handler does after its answer is nothing that the client should wait for.
        self._flush()
        if exchange is not self._active or self._transport is None:
            return
        self._active = None
        if exchange.closes and self._dropping:
            self._linger()
        elif exchange.closes:
            self._end()
        elif self._waiting:
            # Not from here: a row of requests that are answered at once would nest.
            self._loop.call_soon(self._next)

    def _linger(self) -> None:
        assert self._transport is not None, "the caller has looked"
        self._lingering = True
        self._loop.call_later(_LINGER_S, self._end)
        if self._transport.can_write_eof():
            # The client learns that there is nothing more to come. TLS cannot say so.
            self._transport.write_eof()

    def _next(self) -> None:
        if self._active is None and self._waiting and self._transport is not None:
            self._answer(self._waiting.popleft())
            if not self._waiting:
                self._transport.resume_reading()

    def close(self) -> None:
        """Ends the connection after the response that is under way."""
        if self._active is not None:
            self._active.closes = True
        else:
            self._end()

    def _end(self) -> None:
        self._closing = True
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Ends the connection and the handlers now."""
        for task in self._tasks:
            task.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _refuse(self, error: MillraceError) -> None:
        """Answers what cannot be read on with; nothing that follows is read."""
        self._closing = True
        if self._lingering:
            self._end()
            return
        if self._active is not None:
            # Answers come in order, and after this one nothing can be read.
            self._active.closes = True
            return
        exchange = Exchange(self, self._body_limit)
        exchange.closes = True
        self._active = exchange
        exchange.respond_error(error)


def _is_small(declared: bytes, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a body may be kept before it is known whose it is."""
    if b"transfer-encoding" in headers:
        return False
    return not declared or (declared.isdigit() and int(declared) <= _ANYBODYS_BYTES)


def _path(url: bytes) -> str:
    path = url.partition(b"?")[0]
    if b"%" in path:
        path = unquote_to_bytes(path)
    return path.decode("utf-8", "replace")
