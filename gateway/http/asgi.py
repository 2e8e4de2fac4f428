"""The ASGI application: reads a request within its bounds, then has a handler answer it."""

from __future__ import annotations

from typing import Any

from gateway.auth.callers import HttpCallers
from gateway.http.exchange import Exchange, Handler, Receive, Send

# Larger bodies, and those of unknown length, are only taken from callers who have been identified.
_ANYBODYS_BYTES = 64 * 1024


class AsgiApplication:
    """Calls the handler when a request's body is there, or once it is clear that it will not be taken."""

    def __init__(self, handler: Handler, body_limit: int, callers: HttpCallers | None) -> None:
        """With `callers`, nobody without credentials may send a large body."""
        self._handler = handler
        self._body_limit = body_limit
        self._callers = callers

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """See ASGI 3."""
        exchange = Exchange(scope, receive, send, self._body_limit)
        headers = exchange.headers
        declared = headers.get(b"content-length", b"")
        if declared or b"transfer-encoding" in headers:
            num_bytes = int(declared) if declared.isdigit() else None
            if not self._is_taken(exchange, num_bytes):
                exchange.refuse_body(num_bytes or 0)
            else:
                await exchange.read_body()
                if exchange.client_gone:
                    return
        await self._handler(exchange)

    def _is_taken(self, exchange: Exchange, num_bytes: int | None) -> bool:
        if num_bytes is not None and num_bytes > self._body_limit:
            return False
        if self._callers is None or (num_bytes is not None and num_bytes <= _ANYBODYS_BYTES):
            return True
        exchange.identify(self._callers)
        return exchange.caller is not None
