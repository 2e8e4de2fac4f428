"""The page at /ui and the endpoints behind it, as routes of the gateway's HTTP server."""

from __future__ import annotations

from gateway.http.application import Routes
from gateway.http.exchange import Exchange
from gateway.ui import openapi
from gateway.ui.endpoints import ACCOUNT, STATUS, USAGE, AccountEndpoints
from gateway.ui.files import file_handlers


def routes(endpoints: AccountEndpoints) -> Routes:
    """The page's files need no key; what it asks does."""
    schema = openapi.document()

    async def describe(exchange: Exchange) -> None:
        await exchange.respond(200, schema)

    return Routes(
        exact={
            ("GET", ACCOUNT): endpoints.account,
            ("GET", USAGE): endpoints.usage,
            ("GET", STATUS): endpoints.status,
        },
        public={**file_handlers(), ("GET", openapi.PATH): describe},
    )
