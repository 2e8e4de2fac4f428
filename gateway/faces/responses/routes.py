"""The endpoints of the Responses API that are served, and their paths."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gateway.faces.responses import openapi
from gateway.faces.responses.background import BackgroundResponses
from gateway.faces.responses.conversations import CONVERSATIONS, ConversationEndpoints
from gateway.faces.responses.endpoints import ResponseEndpoints
from gateway.faces.responses.socket import ResponseSocket
from gateway.faces.responses.stored import PREFIX, StoredEndpoints
from gateway.faces.sealed import Seal
from gateway.http.application import Routes
from gateway.http.exchange import Exchange
from gateway.pipeline.pipeline import Pipeline
from gateway.store.store import Store


def routes(
    pipeline: Callable[[], Pipeline], secret: bytes, store: Store | None = None
) -> tuple[Routes, BackgroundResponses | None]:
    """The face, and what it computes without connections. `secret` is the deployment's, from which the key is
    derived for what clients keep for us; `store` keeps what is kept here.
    """
    seal = Seal(secret, "millrace responses")
    endpoints = ResponseEndpoints(pipeline, seal, store)
    stored = StoredEndpoints(store)
    conversations = ConversationEndpoints(pipeline, store, lambda tenant: partial(seal.open, tenant))
    schema = openapi.document()

    async def describe(exchange: Exchange) -> None:
        await exchange.respond(200, schema)

    served = Routes(
        exact={
            ("POST", "/v1/responses"): endpoints.create,
            ("POST", "/v1/responses/input_tokens"): endpoints.count,
            ("POST", "/v1/responses/compact"): endpoints.compact,
            ("POST", CONVERSATIONS): conversations.create,
        },
        below={PREFIX: ("", stored.handle), f"{CONVERSATIONS}/": ("", conversations.handle)},
        public={("GET", openapi.PATH): describe},
        batched=("/v1/responses",),
        sockets={"/v1/responses": partial(ResponseSocket, endpoints)},
    )
    return served, endpoints.background
