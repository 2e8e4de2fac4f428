"""The endpoints of Anthropic's API that are served, and their paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.batches.service import Batches
from gateway.faces.anthropic import batches_openapi, openapi
from gateway.faces.anthropic.batches import BATCHES, MESSAGES, MessageBatchEndpoints
from gateway.faces.anthropic.endpoints import MODELS_PATH, MessagesEndpoints
from gateway.http.application import Routes
from gateway.http.exchange import Exchange
from gateway.pipeline.pipeline import Pipeline

# Every client of this API sends it; which version it names makes no difference.
VERSION_HEADER = b"anthropic-version"
# Paths of Anthropic's API that are known and not served.
_NOT_SERVED: Mapping[str, str] = {
    "/v1/complete": "use /v1/messages",
    BATCHES: "have the operator set gateway.batches.directory, or send requests under a lower service_tier",
}


def routes(pipeline: Callable[[], Pipeline], secret: bytes) -> Routes:
    """The face. `pipeline` raises what to answer while there is none yet; `secret` is the deployment's."""
    endpoints = MessagesEndpoints(pipeline, secret)
    schema = openapi.document()

    async def describe(exchange: Exchange) -> None:
        await exchange.respond(200, schema)

    return Routes(
        exact={
            ("POST", MESSAGES): endpoints.create,
            ("POST", "/v1/messages/count_tokens"): endpoints.count_tokens,
        },
        public={("GET", openapi.PATH): describe},
        batched=(MESSAGES,),
        by_header=dict.fromkeys((MODELS_PATH, f"{MODELS_PATH}/"), (VERSION_HEADER, endpoints.models)),
        not_served=_NOT_SERVED,
    )


def batch_routes(pipeline: Callable[[], Pipeline], batches: Batches) -> Routes:
    """Batches of messages."""
    endpoints = MessageBatchEndpoints(batches, lambda: pipeline().intake)
    schema = batches_openapi.document()

    async def describe(exchange: Exchange) -> None:
        await exchange.respond(200, schema)

    return Routes(
        exact={("POST", BATCHES): endpoints.create, ("GET", BATCHES): endpoints.list},
        below={f"{BATCHES}/": ("", endpoints.handle)},
        public={("GET", batches_openapi.PATH): describe},
    )
