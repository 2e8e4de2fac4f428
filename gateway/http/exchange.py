"""One HTTP request and its response: who calls, headers both ways, and the client's disconnection."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Protocol

from gateway.auth.authorizer import KEY_HEADER, TENANT_HEADER, header_value
from gateway.auth.callers import HttpCallers
from gateway.http.errors import Headers, retry_headers
from gateway.openai_error import error_body
from gateway.types.caller import Caller
from services.errors import MillraceError, Reason

_JSON = (b"content-type", b"application/json")
_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus
}
# Of a request that was cancelled, though its client is there. Not an official status.
_STATUS_LINES[499] = b"HTTP/1.1 499 Client Closed Request\r\n"
_EVENTS = _STATUS_LINES[200] + (
    b"content-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\n"
    # Proxies that buffer would hold tokens back.
    b"x-accel-buffering: no\r\n"
)
_WHO = b"%b: %%b\r\n%b: %%b\r\n" % (TENANT_HEADER.encode(), KEY_HEADER.encode())
_LAST_CHUNK = b"0\r\n\r\n"


class Wire(Protocol):
    """The connection, as an exchange uses it."""

    def write(self, data: bytes) -> None:
        """Sends bytes; nothing happens once the client is gone."""
        ...

    async def drained(self) -> None:
        """Waits while the client takes less than is written."""
        ...

    def response_ended(self, exchange: Exchange) -> None:
        """The exchange's response is complete."""
        ...


class Exchange:
    """What the connection has parsed of a request, and its response, which is begun at most once."""

    __slots__ = (
        "_on_gone",
        "_pieces",
        "_wire",
        "begun",
        "body_limit",
        "caller",
        "caller_error",
        "client_gone",
        "closes",
        "ended",
        "extra_headers",
        "headers",
        "is_http_1_0",
        "method",
        "num_body_bytes",
        "path",
        "received_s",
    )

    def __init__(self, wire: Wire, body_limit: int) -> None:
        self.received_s = time.monotonic()
        self.method = ""
        self.path = ""
        # Names in lower case; of a name that came twice the last value.
        self.headers: dict[bytes, bytes] = {}
        self.body_limit = body_limit
        self.num_body_bytes = 0
        self.is_http_1_0 = False
        # The connection ends with this response.
        self.closes = False
        # Added to whatever response comes.
        self.extra_headers: Headers = []
        self.caller: Caller | None = None
        # Why there is no caller, where one was looked for.
        self.caller_error: MillraceError | None = None
        self.begun = False
        self.ended = False
        # The client has closed the connection.
        self.client_gone = False
        self._wire = wire
        self._pieces: list[bytes] = []
        self._on_gone: Callable[[], None] | None = None

    def identify(self, callers: HttpCallers) -> None:
        """Finds out who calls, once; sets `caller` or `caller_error`."""
        if self.caller is None and self.caller_error is None:
            try:
                self.caller = callers.identify(self.headers, self.received_s)
            except MillraceError as error:
                self.caller_error = error

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

    def add_body(self, piece: bytes) -> None:
        """Takes the next piece of the body; what is beyond the limit is dropped."""
        self.num_body_bytes += len(piece)
        if self.too_large:
            self._pieces.clear()
        else:
            self._pieces.append(piece)

    def body(self) -> bytes:
        """The request's body; raises REQUEST_TOO_LARGE, and UNSUPPORTED_FIELD for one that is compressed."""
        if self.too_large:
            raise MillraceError(
                Reason.REQUEST_TOO_LARGE,
                f"the body is larger than the limit of {self.body_limit} bytes; send less",
                metadata={"limit_bytes": str(self.body_limit)},
            )
        encoding = self.headers.get(b"content-encoding")
        if encoding and encoding.lower() != b"identity":
            raise MillraceError(
                Reason.UNSUPPORTED_FIELD,
                f"content-encoding: {encoding.decode('latin-1')!r} is not supported; send the body as it is",
                field="content-encoding",
            )
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def watch_client(self, on_gone: Callable[[], None]) -> None:
        """Calls `on_gone` when the client disconnects, at once if it has, until `unwatch`."""
        self._on_gone = on_gone
        if self.client_gone:
            on_gone()

    def unwatch(self) -> None:
        """Stops watching."""
        self._on_gone = None

    def note_gone(self) -> None:
        """The connection is lost."""
        self.client_gone = True
        if self._on_gone is not None:
            self._on_gone()

    def respond(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = (_JSON,)) -> None:
        """A whole response, JSON unless the headers say otherwise."""
        self.begun = True
        head = [_STATUS_LINES[status]]
        head += [b"%b: %b\r\n" % pair for pair in headers]
        head.append(b"content-length: %d\r\n" % len(body))
        head.append(self._common_head())
        if self.method != "HEAD":
            head.append(body)
        self._wire.write(b"".join(head))
        self._end()

    def respond_error(self, error: MillraceError) -> None:
        """The error's response; the client may be gone already."""
        status = error.mapping.http_status
        headers = [_JSON, *retry_headers(error)]
        if status == HTTPStatus.UNAUTHORIZED:
            headers.append((b"www-authenticate", b"Bearer"))
        self.respond(status, error_body(error), headers)

    def begin_events(self) -> None:
        """Head of an event stream."""
        self.begun = True
        if self.is_http_1_0:
            # Without chunks, only the connection's end can tell the body's.
            self.closes = True
            self._wire.write(_EVENTS + self._common_head())
        else:
            self._wire.write(_EVENTS + b"transfer-encoding: chunked\r\n" + self._common_head())

    async def write(self, body: bytes) -> None:
        """A piece of an event stream; returns when the client has room for more."""
        if body:
            self._wire.write(body if self.is_http_1_0 else b"%x\r\n%b\r\n" % (len(body), body))
            await self._wire.drained()

    def end_events(self, body: bytes) -> None:
        """The last piece of an event stream."""
        if self.is_http_1_0:
            self._wire.write(body)
        else:
            self._wire.write(b"%x\r\n%b\r\n%b" % (len(body), body, _LAST_CHUNK))
        self._end()

    def _end(self) -> None:
        self.ended = True
        self._wire.response_ended(self)

    def _common_head(self) -> bytes:
        elapsed_ms = round((time.monotonic() - self.received_s) * 1000)
        head = b"x-request-id: %b\r\nopenai-processing-ms: %d\r\n" % (
            self.request_id.encode("latin-1"),
            elapsed_ms,
        )
        if self.caller is not None:
            # For the edge's log and traces; it drops them.
            identity = self.caller.identity
            head += _WHO % (header_value(identity.tenant), header_value(identity.key_id))
        if self.extra_headers:
            head += b"".join([b"%b: %b\r\n" % pair for pair in self.extra_headers])
        return head + (b"connection: close\r\n\r\n" if self.closes else b"\r\n")
