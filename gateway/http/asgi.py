"""The ASGI application: reads a request within its bounds, has a handler answer it, and answers what that
raises.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from contract.errors import MillraceError
from gateway.auth.callers import HttpCallers
from gateway.http.errors import unexpected
from gateway.http.exchange import Exchange, Handler, Receive, Send
from gateway.pipeline.intake import LARGE_BYTES, Hold, Intake
from gateway.pipeline.refusals import is_the_callers
from runtime.interceptors import forget_places

_log = logging.getLogger(__name__)


class AsgiApplication:
    """Calls the handler when a request's body is there, or once it is clear that it will not be taken."""

    def __init__(
        self, handler: Handler, body_limit: int, callers: HttpCallers | None, intake: Intake
    ) -> None:
        """With `callers`, nobody without credentials may send a large body."""
        self._handler = handler
        self._body_limit = body_limit
        self._callers = callers
        self._intake = intake

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """See ASGI 3."""
        exchange = Exchange(scope, receive, send, self._body_limit)
        try:
            await self._answer(exchange)
        except asyncio.CancelledError as error:
            # The client left while its request was being accepted: nobody reads an answer.
            if not exchange.client_gone:
                raise
            forget_places(error)
        except Exception as error:
            await self._tell(exchange, error)

    async def _answer(self, exchange: Exchange) -> None:
        headers = exchange.headers
        declared = headers.get(b"content-length", b"")
        if not declared and b"transfer-encoding" not in headers:
            await self._handler(exchange)
            return
        num_bytes = int(declared) if declared.isdigit() else None
        if self._callers is None or (num_bytes is not None and num_bytes <= LARGE_BYTES):
            await self._read(exchange, num_bytes, None)
        elif self._is_taken(exchange, self._callers, num_bytes):
            tenant = exchange.verified_caller.identity.tenant
            with self._intake.hold(tenant) as hold:
                await self._read(exchange, num_bytes, hold)
        else:
            exchange.refuse_body(num_bytes or 0)
            await self._handler(exchange)

    async def _read(self, exchange: Exchange, num_bytes: int | None, hold: Hold | None) -> None:
        if num_bytes is not None and num_bytes > self._body_limit:
            exchange.refuse_body(num_bytes)
        else:
            await exchange.read_body(hold)
        if not exchange.client_gone:
            await self._handler(exchange)

    def _is_taken(self, exchange: Exchange, callers: HttpCallers, num_bytes: int | None) -> bool:
        """Whether a body is, that only callers who have been identified may send."""
        exchange.identify(callers)
        if exchange.caller is None:
            return False
        try:
            exchange.check_encoding()
        except MillraceError:
            exchange.refuse_body(num_bytes or 0)
            raise
        return True

    async def _tell(self, exchange: Exchange, error: Exception) -> None:
        told = error if isinstance(error, MillraceError) else unexpected()
        if told is not error:
            _log.error(
                "unexpected failure at %s, request %s", exchange.path, exchange.request_id, exc_info=error
            )
        # Its places hold all of the request, which has no room to wait in.
        forget_places(error)
        exchange.drop_body()
        if exchange.begun:
            return
        if exchange.caller is not None and is_the_callers(told):
            await self._intake.refusals.turn(exchange.caller.identity.tenant)
        await exchange.respond_error(told)
