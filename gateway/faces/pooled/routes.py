"""The endpoints for models that pool, and their paths."""

from __future__ import annotations

from collections.abc import Callable

from gateway.faces.pooled import openapi
from gateway.faces.pooled.endpoints import PooledEndpoints
from gateway.http.application import Routes
from gateway.http.exchange import Exchange
from gateway.pipeline.pipeline import Pipeline


def routes(pipeline: Callable[[], Pipeline]) -> Routes:
    """The face. `pipeline` raises what to answer while there is none yet."""
    endpoints = PooledEndpoints(pipeline)
    schema = openapi.document()

    async def describe(exchange: Exchange) -> None:
        await exchange.respond(200, schema)

    return Routes(
        exact={
            ("POST", "/v1/embeddings"): endpoints.embed,
            ("POST", "/v1/rerank"): endpoints.rerank,
            ("POST", "/v2/rerank"): endpoints.rerank,
            ("POST", "/rerank"): endpoints.rerank,
            ("POST", "/v1/score"): endpoints.score,
            ("POST", "/score"): endpoints.score,
            ("POST", "/v1/classify"): endpoints.classify,
            ("POST", "/classify"): endpoints.classify,
        },
        public={("GET", openapi.PATH): describe},
        batched=("/v1/embeddings",),
    )
