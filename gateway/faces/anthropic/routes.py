"""The endpoints of Anthropic's API that are served, and their paths."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from contract.errors import invalid
from gateway.batches.service import Batches
from gateway.faces.anthropic import batches_openapi, openapi
from gateway.faces.anthropic.batches import BATCHES, MESSAGES, MessageBatchEndpoints
from gateway.faces.anthropic.endpoints import MODELS_PATH, MessagesEndpoints
from gateway.faces.anthropic.errors import ERRORS
from gateway.faces.anthropic.openapi import USUAL_VERSION, VERSION_PATTERN
from gateway.http.application import Routes
from gateway.http.exchange import Exchange, Handler
from gateway.pipeline.pipeline import Pipeline

# Every SDK of this API sends it. Whoever does not, such as curl, is answered by the newest version, though
# Anthropic refuses that.
VERSION_HEADER = b"anthropic-version"
_VERSION = re.compile(VERSION_PATTERN)
# Paths of Anthropic's API that are known and not served.
_NOT_SERVED: Mapping[str, str] = {
    "/v1/complete": "use /v1/messages",
    BATCHES: "have the operator set gateway.batches.directory, or send requests under a lower service_tier",
}


def _of_version(handler: Handler) -> Handler:
    """The handler, where a request names no version that cannot be one. Its refusals have the API's form."""

    async def checked(exchange: Exchange) -> None:
        exchange.error_form = ERRORS
        version = exchange.headers.get(VERSION_HEADER, USUAL_VERSION.encode()).decode("latin-1")
        if not _VERSION.fullmatch(version):
            remedy = f"send {USUAL_VERSION}, or leave the header out"
            raise invalid(VERSION_HEADER.decode(), f'"{version[:80]}" is not a valid version; {remedy}')
        await handler(exchange)

    return checked


def routes(pipeline: Callable[[], Pipeline], secret: bytes) -> Routes:
    """The face. `pipeline` raises what to answer while there is none yet; `secret` is the deployment's."""
    endpoints = MessagesEndpoints(pipeline, secret)
    schema = openapi.document()

    async def describe(exchange: Exchange) -> None:
        await exchange.respond(200, schema)

    return Routes(
        exact={
            ("POST", MESSAGES): _of_version(endpoints.create),
            ("POST", "/v1/messages/count_tokens"): _of_version(endpoints.count_tokens),
        },
        public={("GET", openapi.PATH): describe},
        batched=(MESSAGES,),
        by_header=dict.fromkeys(
            (MODELS_PATH, f"{MODELS_PATH}/"), (VERSION_HEADER, _of_version(endpoints.models))
        ),
        not_served=_NOT_SERVED,
    )


def batch_routes(pipeline: Callable[[], Pipeline], batches: Batches) -> Routes:
    """Batches of messages."""
    endpoints = MessageBatchEndpoints(batches, lambda: pipeline().intake)
    schema = batches_openapi.document()

    async def describe(exchange: Exchange) -> None:
        await exchange.respond(200, schema)

    return Routes(
        exact={
            ("POST", BATCHES): _of_version(endpoints.create),
            ("GET", BATCHES): _of_version(endpoints.list),
        },
        below={f"{BATCHES}/": ("", _of_version(endpoints.handle))},
        public={("GET", batches_openapi.PATH): describe},
    )
