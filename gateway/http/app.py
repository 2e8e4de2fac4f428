"""The HTTP application: routes, who calls, and errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.http import openapi
from gateway.http.body import ClientGoneError, Receive, Scope, Send
from gateway.http.errors import not_found, unexpected
from gateway.http.exchange import Exchange
from gateway.http.generate import GenerateEndpoints
from gateway.http.inspect import InspectEndpoints
from gateway.openai_error import error_body
from gateway.pipeline.caller import CallerVerifier
from gateway.pipeline.pipeline import Pipeline
from observability.metrics import Metrics
from services.context import CONTEXT_HEADER
from services.errors import MillraceError, Reason

_log = logging.getLogger(__name__)

Handler = Callable[[Exchange], Awaitable[None]]

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


class Endpoint:
    """An ASGI application around one handler: verifies the caller and answers errors."""

    def __init__(self, callers: CallerVerifier, handler: Handler) -> None:
        self._callers = callers
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        exchange = Exchange(scope, receive, send)
        try:
            exchange.caller = self._callers.verify(
                exchange.header(_CONTEXT) or None,
                received_s=exchange.received_s,
                traceparent=exchange.header(b"traceparent"),
                tracestate=exchange.header(b"tracestate"),
                client_request_id=exchange.header(b"x-client-request-id"),
            )
            await self._handler(exchange)
        except MillraceError as error:
            if not exchange.begun:
                await exchange.respond_error(error)
        except ClientGoneError:
            return
        except asyncio.CancelledError:
            # The client left while its request was being accepted: nobody reads an answer.
            if exchange.client_gone:
                return
            raise
        except Exception:
            _log.exception("unexpected failure at %s, request %s", exchange.path, exchange.request_id)
            if not exchange.begun:
                await exchange.respond_error(unexpected())


class Application:
    """Sends the generating endpoints straight to their handlers: Starlette's layers would wrap every write.

    Starlette has the same routes as well and answers everything else, wrong methods included.
    """

    def __init__(self, direct: Mapping[tuple[str, str], Endpoint], rest: Starlette) -> None:
        self._direct = direct
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        endpoint = self._direct.get((scope.get("method", ""), scope.get("path", "")))
        await (endpoint or self._rest)(scope, receive, send)


def build_app(
    pipeline: Callable[[], Pipeline],
    callers: CallerVerifier,
    metrics: Metrics,
    not_ready: Callable[[], str],
    details: Callable[[], dict[str, str]],
    *,
    max_body_bytes: int,
) -> Application:
    """The application of one gateway process.

    `pipeline` raises what to answer while there is none yet; `not_ready` says what is missing, "" for
    nothing; `details` is shown on the health page.
    """
    generate = GenerateEndpoints(pipeline, max_body_bytes)
    inspect = InspectEndpoints(pipeline, max_body_bytes)

    async def health(request: Request) -> Response:
        missing = not_ready()
        state = {"status": "unavailable", "missing": missing} if missing else {"status": "ok"}
        body = msgspec.json.encode({**state, **details()})
        return Response(body, 503 if missing else 200, media_type="application/json")

    async def expose(request: Request) -> Response:
        body, content_type = metrics.expose(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    schema = openapi.document()

    async def describe(request: Request) -> Response:
        return Response(schema, media_type="application/json")

    def route(path: str, method: str, handler: Handler) -> Route:
        return Route(path, Endpoint(callers, handler), methods=[method])

    rest = Starlette(
        routes=[
            route("/v1/chat/completions", "POST", generate.chat),
            route("/v1/completions", "POST", generate.complete),
            route("/v1/models", "GET", inspect.models),
            route("/v1/models/{model:path}", "GET", inspect.model),
            route("/tokenize", "POST", inspect.tokenize),
            route("/detokenize", "POST", inspect.detokenize),
            Route("/health", health, methods=["GET"]),
            Route("/metrics", expose, methods=["GET"]),
            Route("/openapi.json", describe, methods=["GET"]),
        ],
        exception_handlers={HTTPException: _http_error},
    )
    return Application(
        {
            ("POST", "/v1/chat/completions"): Endpoint(callers, generate.chat),
            ("POST", "/v1/completions"): Endpoint(callers, generate.complete),
        },
        rest,
    )


async def _http_error(request: Request, failure: Any) -> Response:
    path = request.url.path
    if failure.status_code == 405:
        error = MillraceError(
            Reason.METHOD_NOT_ALLOWED,
            f"{path} does not take {request.method}; use {failure.headers['Allow']}",
        )
    else:
        error = not_found(path, _NOT_SERVED)
    headers = dict(failure.headers or {})
    headers["x-request-id"] = request.headers.get("x-request-id", "")
    return Response(
        error_body(error), error.mapping.http_status, headers=headers, media_type="application/json"
    )
