"""The HTTP application: routes, who calls, and errors in OpenAI's form."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

import msgspec

from contract.errors import MillraceError, Reason
from gateway.auth.authorizer import AUTHORIZE_PREFIX, QUESTION_HEADER, Authorizer
from gateway.auth.callers import HttpCallers
from gateway.http import openapi
from gateway.http.adapters import AdapterEndpoints
from gateway.http.errors import not_found
from gateway.http.exchange import Exchange, Handler
from gateway.http.generate import GenerateEndpoints
from gateway.http.inspect import MODELS_PREFIX, InspectEndpoints
from gateway.limits.counter import RequestCounter, exceeded_headers
from gateway.pipeline.pipeline import Pipeline
from observability.emit.metrics import Metrics
from runtime.deferred import Deferred

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


def known(callers: HttpCallers, counter: RequestCounter, handler: Handler) -> Handler:
    """The handler behind the check of who calls and how often."""

    async def checked(exchange: Exchange) -> None:
        exchange.identify(callers)
        caller = exchange.verified_caller
        if callers.is_counted(caller):
            identity = caller.identity
            try:
                exchange.add_headers(await counter.count(identity.tenant, identity.key_id, caller.trace))
            except MillraceError as error:
                exchange.add_headers(exceeded_headers(error))
                raise
        await handler(exchange)

    return checked


async def authorize(authorizer: Authorizer, exchange: Exchange) -> None:
    """Answers a question of Envoy's. A request of a client's that gets to its path is none."""
    if QUESTION_HEADER.encode() not in exchange.headers:
        await exchange.respond_error(not_found(exchange.path, {}))
        return
    answer = authorizer.check(exchange.headers)
    await exchange.respond(answer.status, answer.body, answer.headers)


class Application:
    """Calls the handler of an exchange's method and path. HEAD is answered as GET, without the body."""

    def __init__(
        self,
        routes: Mapping[tuple[str, str], Handler],
        below: Mapping[str, tuple[str, Handler]],
        wrap: Callable[[Handler], Handler],
        public: Collection[str] = (),
    ) -> None:
        """`below` has a method ("" for any) and a handler for all paths that begin in one way.

        `wrap` makes of a handler one that asks who calls: what there is, and what not, is told to callers,
        save for `public` paths.
        """
        self._routes = routes
        self._below = below
        self._nothing = wrap(self._refuse)
        self._public = public

    async def __call__(self, exchange: Exchange) -> None:
        """See Handler."""
        handler = self._routes.get((exchange.method, exchange.path)) or self._other(exchange)
        await handler(exchange)

    def _other(self, exchange: Exchange) -> Handler:
        path, method = exchange.path, "GET" if exchange.method == "HEAD" else exchange.method
        for beginning, (served, handler) in self._below.items():
            if path.startswith(beginning) and served in ("", method):
                return handler
        return self._routes.get((method, path), self._refuse if path in self._public else self._nothing)

    async def _refuse(self, exchange: Exchange) -> None:
        path = exchange.path
        methods = [method for method, served in self._routes if served == path]
        methods += [method for beginning, (method, _) in self._below.items() if path.startswith(beginning)]
        allowed = ", ".join(methods)
        if not allowed:
            raise not_found(path, _NOT_SERVED)
        exchange.add_headers({"allow": allowed})
        raise MillraceError(
            Reason.METHOD_NOT_ALLOWED, f"{path} does not take {exchange.method}; use {allowed}"
        )


def build_app(
    pipeline: Callable[[], Pipeline],
    callers: HttpCallers,
    counter: RequestCounter,
    authorizer: Authorizer,
    metrics: Metrics,
    deferred: Deferred,
    not_ready: Callable[[], str],
    details: Callable[[], dict[str, str]],
    admin_tenants: tuple[str, ...] = (),
) -> Application:
    """The application of one gateway process.

    `pipeline` raises what to answer while there is none yet; `not_ready` says what is missing, "" for
    nothing; `details` is shown on the health page.
    """
    generate = GenerateEndpoints(pipeline)
    inspect, adapters = InspectEndpoints(pipeline), AdapterEndpoints(pipeline, admin_tenants)

    async def health(exchange: Exchange) -> None:
        missing = not_ready()
        state = {"status": "unavailable", "missing": missing} if missing else {"status": "ok"}
        await exchange.respond(503 if missing else 200, msgspec.json.encode({**state, **details()}))

    async def expose(exchange: Exchange) -> None:
        # A page shows whatever ended before it was asked for.
        deferred.flush()
        body, content_type = metrics.expose(exchange.header(b"accept"))
        await exchange.respond(200, body, [(b"content-type", content_type.encode())])

    schema = openapi.document()

    async def describe(exchange: Exchange) -> None:
        await exchange.respond(200, schema)

    ours = partial(known, callers, counter)
    return Application(
        {
            ("POST", "/v1/chat/completions"): ours(generate.chat),
            ("POST", "/v1/completions"): ours(generate.complete),
            ("GET", "/v1/models"): ours(inspect.models),
            ("GET", "/v1/lora_adapters"): ours(adapters.list),
            ("POST", "/v1/load_lora_adapter"): ours(adapters.load),
            ("POST", "/v1/unload_lora_adapter"): ours(adapters.unload),
            ("POST", "/tokenize"): ours(inspect.tokenize),
            ("POST", "/detokenize"): ours(inspect.detokenize),
            ("GET", "/health"): health,
            ("GET", "/metrics"): expose,
            ("GET", "/openapi.json"): describe,
        },
        {
            AUTHORIZE_PREFIX: ("", partial(authorize, authorizer)),
            MODELS_PREFIX: ("GET", ours(inspect.model)),
        },
        ours,
        public=("/health", "/openapi.json"),
    )
