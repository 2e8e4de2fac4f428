"""The HTTP application: routes, who calls, and errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeAlias

import msgspec

from gateway.auth.authorizer import AUTHORIZE_PREFIX, Authorizer
from gateway.http import openapi
from gateway.http.connection import Handler
from gateway.http.errors import not_found, unexpected
from gateway.http.exchange import Exchange
from gateway.http.generate import GenerateEndpoints
from gateway.http.inspect import MODELS_PREFIX, InspectEndpoints
from gateway.pipeline.caller import CallerVerifier
from gateway.pipeline.pipeline import Pipeline
from observability.metrics import Metrics
from services.context import CONTEXT_HEADER
from services.errors import MillraceError, Reason

_log = logging.getLogger(__name__)

# Paths of OpenAI's API that are known and not served.
_NOT_SERVED: Mapping[str, str] = {
    "/v1/embeddings": "the served model generates text and has no embeddings",
    "/v1/responses": "use /v1/chat/completions",
    "/v1/moderations": "moderation is not served",
    "/v1/images/generations": "images are not served",
    "/v1/audio/speech": "audio is not served",
    "/v1/audio/transcriptions": "audio is not served",
    "/v1/files": "files are not kept",
    "/v1/batches": "send requests under a lower service_tier instead",
    "/v1/assistants": "use /v1/chat/completions",
    "/v1/edits": "use /v1/chat/completions",
}

_CONTEXT = CONTEXT_HEADER.encode()

Answering: TypeAlias = "Coroutine[Any, Any, None] | None"


class Endpoint:
    """A handler behind the check of who calls; whatever it raises is answered."""

    def __init__(self, callers: CallerVerifier, handler: Handler) -> None:
        self._callers = callers
        self._handler = handler

    def __call__(self, exchange: Exchange) -> Answering:
        """See Handler."""
        try:
            exchange.caller = self._callers.verify(
                exchange.header(_CONTEXT) or None,
                received_s=exchange.received_s,
                traceparent=exchange.header(b"traceparent"),
                tracestate=exchange.header(b"tracestate"),
                client_request_id=exchange.header(b"x-client-request-id"),
            )
            answering = self._handler(exchange)
        except Exception as error:
            _tell(exchange, error)
            return None
        return None if answering is None else self._follow(exchange, answering)

    async def _follow(self, exchange: Exchange, answering: Coroutine[Any, Any, None]) -> None:
        try:
            await answering
        except asyncio.CancelledError:
            # The client left while its request was being accepted: nobody reads an answer.
            if not exchange.client_gone:
                raise
        except Exception as error:
            _tell(exchange, error)


def _tell(exchange: Exchange, error: Exception) -> None:
    if not isinstance(error, MillraceError):
        _log.error("unexpected failure at %s, request %s", exchange.path, exchange.request_id, exc_info=error)
        error = unexpected()
    if not exchange.begun:
        exchange.respond_error(error)


class Application:
    """Calls the handler of an exchange's method and path. HEAD is answered as GET, without the body."""

    def __init__(
        self, routes: Mapping[tuple[str, str], Handler], below: Mapping[str, tuple[str, Handler]]
    ) -> None:
        """`below` has a method ("" for any) and a handler for all paths that begin in one way."""
        self._routes = routes
        self._below = below

    def __call__(self, exchange: Exchange) -> Answering:
        """See Handler."""
        handler = self._routes.get((exchange.method, exchange.path)) or self._other(exchange)
        return handler(exchange)

    def _other(self, exchange: Exchange) -> Handler:
        path, method = exchange.path, "GET" if exchange.method == "HEAD" else exchange.method
        for beginning, (served, handler) in self._below.items():
            if path.startswith(beginning) and served in ("", method):
                return handler
        return self._routes.get((method, path), self._refuse)

    def _refuse(self, exchange: Exchange) -> None:
        path = exchange.path
        methods = [method for method, served in self._routes if served == path]
        methods += [method for beginning, (method, _) in self._below.items() if path.startswith(beginning)]
        allowed = ", ".join(methods)
        if not allowed:
            exchange.respond_error(not_found(path, _NOT_SERVED))
            return
        exchange.extra_headers.append((b"allow", allowed.encode()))
        exchange.respond_error(
            MillraceError(Reason.METHOD_NOT_ALLOWED, f"{path} does not take {exchange.method}; use {allowed}")
        )


def build_app(
    pipeline: Callable[[], Pipeline],
    callers: CallerVerifier,
    authorizer: Authorizer,
    metrics: Metrics,
    not_ready: Callable[[], str],
    details: Callable[[], dict[str, str]],
) -> Application:
    """The application of one gateway process.

    `pipeline` raises what to answer while there is none yet; `not_ready` says what is missing, "" for
    nothing; `details` is shown on the health page.
    """
    generate = GenerateEndpoints(pipeline)
    inspect = InspectEndpoints(pipeline)

    def health(exchange: Exchange) -> None:
        missing = not_ready()
        state = {"status": "unavailable", "missing": missing} if missing else {"status": "ok"}
        exchange.respond(503 if missing else 200, msgspec.json.encode({**state, **details()}))

    def expose(exchange: Exchange) -> None:
        body, content_type = metrics.expose(exchange.header(b"accept"))
        exchange.respond(200, body, [(b"content-type", content_type.encode())])

    schema = openapi.document()

    def describe(exchange: Exchange) -> None:
        exchange.respond(200, schema)

    def authorize(exchange: Exchange) -> None:
        answer = authorizer.check(exchange.headers)
        exchange.respond(answer.status, answer.body, answer.headers)

    return Application(
        {
            ("POST", "/v1/chat/completions"): Endpoint(callers, generate.chat),
            ("POST", "/v1/completions"): Endpoint(callers, generate.complete),
            ("GET", "/v1/models"): Endpoint(callers, inspect.models),
            ("POST", "/tokenize"): Endpoint(callers, inspect.tokenize),
            ("POST", "/detokenize"): Endpoint(callers, inspect.detokenize),
            ("GET", "/health"): health,
            ("GET", "/metrics"): expose,
            ("GET", "/openapi.json"): describe,
        },
        {
            AUTHORIZE_PREFIX: ("", authorize),
            MODELS_PREFIX: ("GET", Endpoint(callers, inspect.model)),
        },
    )
