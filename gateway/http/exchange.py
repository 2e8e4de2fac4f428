"""One HTTP request and its response over ASGI: who calls, headers both ways, and the client's leaving."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any, TypeAlias

from contract.errors import MillraceError, Reason, unsupported
from gateway.auth.authorizer import KEY_HEADER, TENANT_HEADER, HttpCallers, header_value
from gateway.intake.intake import ByteLease
from gateway.types.error_form import ErrorForm
from gateway.types.request import Caller

Receive: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
Headers: TypeAlias = list[tuple[bytes, bytes]]
Send: TypeAlias = Callable[[dict[str, Any]], Awaitable[None]]

_JSON = (b"content-type", b"application/json")
_EVENTS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies that buffer would hold tokens back.
    (b"x-accel-buffering", b"no"),
)
_TENANT = TENANT_HEADER.encode()
_KEY = KEY_HEADER.encode()
# How long the rest of a body that is not taken is read and dropped. Closing at once would make the kernel
# reset the connection, and the answer would be lost with it.
_LINGER_S = 5.0


class Exchange:
    """A request as ASGI gives it, and its response, which is begun at most once."""

    def __init__(
        self,
        scope: dict[str, Any],
        receive: Receive,
        send: Send,
        body_limit: int,
        error_form: ErrorForm,
    ) -> None:
        self.received_s = time.monotonic()
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: str = scope.get("query_string", b"").decode("latin-1")
        # Names in lower case; of a name that came twice the last value.
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.body_limit = body_limit
        self.num_body_bytes = 0
        self.extra_headers: Headers = []
        self.caller: Caller | None = None
        # Why there is no caller, where one was looked for.
        self.caller_error: MillraceError | None = None
        self.begun = False
        self.ended = False
        # The client has closed the connection.
        self.client_gone = False
        # Errors are written in it; the path's, unless the request's headers speak another API.
        self.error_form = error_form
        self._receive = receive
        self._send = send
        self._pieces: list[bytes] = []
        # The connection ends with this response; more of the body may come until then.
        self._closes = self._body_follows = False
        self._is_upload = False
        self._on_gone: Callable[[], None] | None = None
        self._watch: asyncio.Task[None] | None = None

    def identify(self, callers: HttpCallers) -> None:
        """Finds out who calls, once; sets `caller` or `caller_error`."""
        if self.caller is None and self.caller_error is None:
            try:
                self.caller = callers.identify(self.headers, self.received_s)
            except MillraceError as error:
                self.caller_error = error

    @property
    def verified_caller(self) -> Caller:
        """The caller, once `identify` has looked for it; raises why there is none."""
        if self.caller is None:
            assert self.caller_error is not None, "identify sets one of the two"
            raise self.caller_error
        return self.caller

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Adds headers to whatever response comes."""
        self.extra_headers += encoded(headers)

    def header(self, name: bytes) -> str:
        """A request header as text, "" when it is not there."""
        return self.headers.get(name, b"").decode("latin-1")

    @property
    def request_id(self) -> str:
        """The verified id, or the one that the edge gave."""
        if self.caller is not None:
            return self.caller.identity.request_id
        return self.header(b"x-request-id")

    @property
    def too_large(self) -> bool:
        """Whether more came, or was declared, than the limit of the body."""
        return self.num_body_bytes > self.body_limit

    async def read_body(self, hold: ByteLease | None = None) -> None:
        """Reads the body to its end, or until it is too large; sets `client_gone` where there is no end.

        Raises as `ByteLease.grow_by_body` does where the tenant's or the gateway's bytes are used up.
        """
        more = True
        while more and not self.too_large:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.client_gone = True
                return
            piece: bytes = message["body"]
            if hold is not None:
                self._hold(hold, len(piece))
            self.num_body_bytes += len(piece)
            self._pieces.append(piece)
            more = message["more_body"]
        if self.too_large:
            self._pieces.clear()
            self._closes = True
            self._body_follows = more

    def begin_upload(self, body_limit: int, num_declared_bytes: int | None) -> None:
        """The body is left to `body_pieces`, and has a limit of its own."""
        self.body_limit = body_limit
        self.refuse_body(num_declared_bytes or 0)
        self._is_upload = True

    async def body_pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes: of an upload from the wire, else what was read of it. Raises
        REQUEST_TOO_LARGE, and CANCELLED where it has no end.
        """
        if self.too_large or not self._is_upload:
            yield self.take_body()
            return
        self.check_encoding()
        self.num_body_bytes, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.client_gone = True
                raise MillraceError(Reason.CANCELLED, "the client left before its body was complete")
            self.num_body_bytes += len(message["body"])
            if self.too_large:
                self.take_body()
            more = message["more_body"]
            yield message["body"]
        # All of it is there, so that the connection may go on.
        self._closes = self._body_follows = False

    def _hold(self, hold: ByteLease, num_bytes: int) -> None:
        try:
            hold.grow_by_body(num_bytes)
        except MillraceError:
            self._pieces.clear()
            self.refuse_body(0)
            raise

    def refuse_body(self, num_declared_bytes: int) -> None:
        """The body is not taken: what comes of it is dropped, and the connection ends with the response."""
        self.num_body_bytes = num_declared_bytes
        self._closes = True
        # A client that waits to be told to go on never sends it.
        self._body_follows = self.headers.get(b"expect", b"").lower() != b"100-continue"

    def check_encoding(self) -> None:
        """Raises UNSUPPORTED_FIELD for a body that is compressed."""
        encoding = self.headers.get(b"content-encoding")
        if encoding and encoding.lower() != b"identity":
            problem = f"{encoding.decode('latin-1')!r} is not supported"
            raise unsupported("content-encoding", "send the body as it is", problem)

    def take_body(self) -> bytes:
        """The request's body, once; raises REQUEST_TOO_LARGE, and as `check_encoding` does."""
        if self.too_large:
            raise MillraceError(
                Reason.REQUEST_TOO_LARGE,
                f"the body is larger than the limit of {self.body_limit} bytes; send less",
                metadata={"limit_bytes": str(self.body_limit)},
            )
        self.check_encoding()
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def peek_body(self) -> bytes:
        """What was read of the request's body and nobody has taken; it stays to be taken."""
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def drop_body(self) -> None:
        """Forgets what was read of the body: nobody takes it any more."""
        self._pieces.clear()

    def watch_client(self, on_gone: Callable[[], None]) -> None:
        """Calls `on_gone` when the client disconnects before its answer is over, until `unwatch`."""
        self._on_gone = on_gone
        if self._watch is None:
            self._watch = asyncio.create_task(self._await_end())

    async def _await_end(self) -> None:
        # It comes when the answer is over, too: this task always ends by itself.
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.ended:
            self.client_gone = True
            if self._on_gone is not None:
                self._on_gone()

    def unwatch(self) -> None:
        """Stops watching."""
        self._on_gone = None

    async def respond(
        self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = (_JSON,)
    ) -> None:
        """A whole response, JSON unless the headers say otherwise."""
        await self._begin(status, [*headers, (b"content-length", b"%d" % len(body))])
        if self._body_follows:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            await self._drop_body()
            body = b""
        await self._end(body)

    async def _drop_body(self) -> None:
        message: dict[str, Any] = {"more_body": True}
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while message.get("more_body"):
                    message = await self._receive()

    async def respond_error(self, error: MillraceError) -> None:
        """The error's response; the client may be gone already."""
        form, body = self.error_form, self.error_form.body(error, self.request_id)
        await self.respond(form.status(error), body, encoded(form.headers(error)))

    async def begin_events(self) -> None:
        """Head of an event stream, unless it has been written."""
        if self.begun:
            return
        await self._begin(HTTPStatus.OK, [*_EVENTS])

    async def begin_content(self, content_type: str, num_bytes: int) -> None:
        """Head of so many bytes, which `write` and `end_events` send."""
        length = (b"content-length", b"%d" % num_bytes)
        await self._begin(HTTPStatus.OK, [(b"content-type", content_type.encode()), length])

    async def write(self, body: bytes) -> None:
        """A piece of an event stream; returns when the client has room for more."""
        if body:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end_events(self, body: bytes) -> None:
        """The last piece of an event stream."""
        await self._end(body)

    async def _begin(self, status: int, headers: Headers) -> None:
        self.begun = True
        headers += self.response_headers()
        await self._send({"type": "http.response.start", "status": int(status), "headers": headers})

    async def _end(self, body: bytes) -> None:
        self.ended = True
        await self._send({"type": "http.response.body", "body": body})

    def response_headers(self) -> Headers:
        """What every response says in its headers, whatever it is."""
        request_id = self.request_id.encode("latin-1")
        headers = [(b"x-request-id", request_id)]
        if self.error_form.request_id_header:
            headers.append((self.error_form.request_id_header.encode(), request_id))
        if self.error_form.elapsed_header:
            elapsed_ms = round((time.monotonic() - self.received_s) * 1000)
            headers.append((self.error_form.elapsed_header.encode(), b"%d" % elapsed_ms))
        headers += self.extra_headers
        if self.caller is not None:
            # For the edge's log and traces; it drops them.
            identity = self.caller.identity
            headers += ((_TENANT, header_value(identity.tenant)), (_KEY, header_value(identity.key_id)))
        if self._closes:
            headers.append((b"connection", b"close"))
        return headers


def encoded(headers: Mapping[str, str]) -> Headers:
    """Headers as ASGI has them."""
    return [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]


# Answers an exchange.
Handler: TypeAlias = Callable[[Exchange], Awaitable[None]]
