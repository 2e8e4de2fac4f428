"""One HTTP request and its response: who calls, headers both ways, and the client's disconnection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from gateway.http.body import Receive, Scope, Send, read_body
from gateway.http.errors import Headers, retry_headers
from gateway.openai_error import error_body
from gateway.pipeline.caller import Caller
from services.errors import MillraceError

_JSON = (b"content-type", b"application/json")
_EVENTS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies that buffer would hold tokens back.
    (b"x-accel-buffering", b"no"),
]


class Exchange:
    """Wraps ASGI's three arguments. At most one response is begun."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.received_s = time.monotonic()
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        # Added to whatever response comes.
        self.extra_headers: Headers = []
        self.caller: Caller | None = None
        self.begun = False
        # The client has closed the connection while it was watched.
        self.client_gone = False
        self._receive = receive
        self._send = send
        self._watch: asyncio.Task[None] | None = None

    def header(self, name: bytes) -> str:
        """A request header as text, "" when it is not there."""
        return self.headers.get(name, b"").decode("latin-1")

    @property
    def request_id(self) -> str:
        """The verified id, or the one that the edge gave."""
        if self.caller is not None:
            return self.caller.identity.request_id
        return self.header(b"x-request-id")

    async def body(self, limit_bytes: int) -> bytes:
        """The request's body."""
        return await read_body(self._receive, self.headers, limit_bytes)

    def watch_client(self, on_gone: Callable[[], None]) -> None:
        """Calls `on_gone` when the client disconnects before `unwatch`. The body must have been read."""
        self._watch = asyncio.get_running_loop().create_task(self._wait_gone(on_gone))

    async def _wait_gone(self, on_gone: Callable[[], None]) -> None:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.client_gone = True
            on_gone()

    def unwatch(self) -> None:
        """Stops watching."""
        if self._watch is not None:
            self._watch.cancel()

    async def respond(self, status: int, body: bytes, headers: Headers | None = None) -> None:
        """A whole JSON response."""
        self.begun = True
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    *(headers or [_JSON]),
                    (b"content-length", str(len(body)).encode()),
                    *self._common_headers(),
                ],
            }
        )
        await self._send({"type": "http.response.body", "body": body})

    async def respond_error(self, error: MillraceError) -> None:
        """The error's response; the client may be gone already."""
        await self.respond(error.mapping.http_status, error_body(error), [_JSON, *retry_headers(error)])

    async def begin_events(self) -> None:
        """Head of an event stream."""
        self.begun = True
        await self._send(
            {"type": "http.response.start", "status": 200, "headers": [*_EVENTS, *self._common_headers()]}
        )

    async def write(self, body: bytes, *, last: bool = False) -> None:
        """A piece of an event stream."""
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})

    def _common_headers(self) -> Headers:
        elapsed_ms = round((time.monotonic() - self.received_s) * 1000)
        return [
            (b"x-request-id", self.request_id.encode("latin-1")),
            (b"openai-processing-ms", str(elapsed_ms).encode()),
            *self.extra_headers,
        ]
