"""The HTTP application: routes, who calls, and what is served to nobody in particular."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec

from contract.errors import MillraceError, Reason
from gateway.auth.authorizer import AUTHORIZE_PREFIX, QUESTION_HEADER, Authorizer, HttpCallers
from gateway.http.errors import not_found, unexpected
from gateway.http.exchange import Exchange, Handler, Receive, Send
from gateway.http.sockets import SocketHandler, SocketRoute, Sockets
from gateway.intake.intake import LARGE_BYTES, ByteLease, Intake
from gateway.intake.refusals import is_the_callers
from gateway.limits.counter import RequestCounter, exceeded_headers
from gateway.types.error_form import ErrorForm, ErrorForms
from observability.emit.metrics import Metrics
from runtime.deferred import Deferred
from runtime.interceptors import drop_traceback

# The ASGI application: reads a request within its bounds, has a handler answer it, and answers what that
# raises.

_log = logging.getLogger(__name__)
# How paths end at which faces describe what they serve.
_DESCRIPTION = "/openapi.json"


class AsgiApplication:
    """Calls the handler when a request's body is there, or once it is clear that it will not be taken."""

    def __init__(
        self,
        handler: Handler,
        body_limit: int,
        callers: HttpCallers | None,
        intake: Intake,
        error_forms: ErrorForms,
    ) -> None:
        """With `callers`, nobody without credentials may send a large body."""
        self._handler = handler
        self._body_limit = body_limit
        self._callers = callers
        self._intake = intake
        self._error_forms = error_forms
        # Without them the server switches no connection.
        self.sockets: Sockets | None = None
        # See Routes.
        self.uploads: Mapping[str, int] = {}

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """See ASGI 3."""
        if scope["type"] == "websocket":
            assert self.sockets is not None, "the server switches at paths of sockets alone"
            await self.sockets.serve(scope, receive, send)
            return
        form = self._error_forms.of(scope["path"])
        exchange = Exchange(scope, receive, send, self._body_limit, form)
        try:
            await self._answer(exchange)
        except asyncio.CancelledError as error:
            # The client left while its request was being accepted: nobody reads an answer.
            if not exchange.client_gone:
                raise
            drop_traceback(error)
        except Exception as error:
            await self.tell(exchange, error)

    async def _answer(self, exchange: Exchange) -> None:
        headers = exchange.headers
        declared = headers.get(b"content-length", b"")
        if not declared and b"transfer-encoding" not in headers:
            await self._handler(exchange)
            return
        num_bytes = int(declared) if declared.isdigit() else None
        is_upload = exchange.method == "POST" and exchange.path in self.uploads
        is_small = num_bytes is not None and num_bytes <= LARGE_BYTES and not is_upload
        if self._callers is None or is_small:
            await self._read(exchange, num_bytes, None)
        elif self._is_taken(exchange, self._callers, num_bytes):
            if is_upload:
                exchange.begin_upload(self.uploads[exchange.path], num_bytes)
                await self._handler(exchange)
                return
            tenant = exchange.verified_caller.identity.tenant
            with self._intake.lease(tenant) as hold:
                await self._read(exchange, num_bytes, hold)
        else:
            exchange.refuse_body(num_bytes or 0)
            await self._handler(exchange)

    async def _read(self, exchange: Exchange, num_bytes: int | None, hold: ByteLease | None) -> None:
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

    async def tell(self, exchange: Exchange, error: Exception) -> None:
        """Answers what a handler has raised."""
        answered = error if isinstance(error, MillraceError) else unexpected()
        if answered is not error:
            _log.error(
                "unexpected failure at %s, request %s", exchange.path, exchange.request_id, exc_info=error
            )
        # The frames of its traceback refer to the whole request, whose memory would be kept while this waits.
        drop_traceback(error)
        exchange.drop_body()
        if exchange.begun:
            if not exchange.ended:
                # A stream that has said nothing yet but that it waits.
                await exchange.end_events(exchange.error_form.event(answered, exchange.request_id))
            return
        if exchange.caller is not None and is_the_callers(answered):
            await self._intake.refusals.throttle(exchange.caller.identity.tenant)
        await exchange.respond_error(answered)


class HealthPage(msgspec.Struct, frozen=True, kw_only=True):
    """Whether requests are served, what is missing, and how the shared limit store is, where there is one."""

    status: Literal["ok", "unavailable"]
    missing: str | msgspec.UnsetType = msgspec.UNSET
    limit_store: str | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, kw_only=True)
class Routes:
    """The handlers of a face. All of them need a caller, save for those that are `public`."""

    # By method and path.
    exact: Mapping[tuple[str, str], Handler]
    # By the beginning of paths: a method and a handler for all of them.
    below: Mapping[str, tuple[str, Handler]] = field(default_factory=dict)
    public: Mapping[tuple[str, str], Handler] = field(default_factory=dict)
    # By a path, or a beginning of paths, that another face has: the header by which a request says that it
    # speaks this face's API instead, and the handler.
    by_header: Mapping[str, tuple[bytes, Handler]] = field(default_factory=dict)
    # By path: what makes the handler of a WebSocket that is opened there.
    sockets: Mapping[str, Callable[[ErrorForm], SocketHandler]] = field(default_factory=dict)
    # Paths among `exact` whose POST answers a line of a batch.
    batched: Collection[str] = ()
    # Paths whose POST has a body that the handler reads piece by piece, with its limit in bytes.
    uploads: Mapping[str, int] = field(default_factory=dict)
    # Paths of its API that are known and not served, with the remedy.
    not_served: Mapping[str, str] = field(default_factory=dict)


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


def spoken(handler: Handler, header: bytes, other: Handler) -> Handler:
    """The handler, or the other one where a request has the header."""

    async def chosen(exchange: Exchange) -> None:
        await (other if header in exchange.headers else handler)(exchange)

    return chosen


async def authorize(authorizer: Authorizer, exchange: Exchange) -> None:
    """Answers a question of Envoy's. A request of a client's that gets to its path is none."""
    if QUESTION_HEADER.encode() not in exchange.headers:
        await exchange.respond_error(not_found(exchange.path, {}))
        return
    path = exchange.path.removeprefix(AUTHORIZE_PREFIX.rstrip("/"))
    answer = authorizer.check(path, exchange.headers)
    await exchange.respond(answer.status, answer.body, answer.headers)


class Application:
    """Calls the handler of an exchange's method and path. HEAD is answered as GET, without the body."""

    def __init__(
        self,
        routes: Mapping[tuple[str, str], Handler],
        below: Mapping[str, tuple[str, Handler]],
        wrap: Callable[[Handler], Handler],
        public: Collection[str] = (),
        not_served: Mapping[str, str] | None = None,
        sockets: Mapping[str, SocketRoute] | None = None,
        uploads: Mapping[str, int] | None = None,
    ) -> None:
        """`below` has a method ("" for any) and a handler for all paths that begin in one way.

        `wrap` makes of a handler one that needs a caller. Without one, nobody learns which paths there are,
        save for `public` ones.
        """
        self._routes = routes
        self._own_paths = frozenset(path for _, path in routes)
        self._below = below
        self._nothing = wrap(self._refuse)
        self._public = public
        self._not_served = not_served or {}
        self.sockets = sockets or {}
        self.uploads = uploads or {}

    async def __call__(self, exchange: Exchange) -> None:
        """See Handler."""
        handler = self._routes.get((exchange.method, exchange.path)) or self._other(exchange)
        await handler(exchange)

    def _other(self, exchange: Exchange) -> Handler:
        path, method = exchange.path, "GET" if exchange.method == "HEAD" else exchange.method
        if (found := self._routes.get((method, path))) is not None:
            return found
        # A path of its own is no parameter of what is below another one: its methods are all that it takes.
        any_method = path not in self._own_paths
        for beginning, (served, handler) in self._below.items():
            if path.startswith(beginning) and (served == method or (served == "" and any_method)):
                return handler
        return self._refuse if path in self._public else self._nothing

    async def _refuse(self, exchange: Exchange) -> None:
        path = exchange.path
        methods = [method for method, served in self._routes if served == path]
        below = [method for beginning, (method, _) in self._below.items() if path.startswith(beginning)]
        methods += filter(None, below)
        allowed = ", ".join(methods)
        if not allowed:
            described = [each for each in self._public if each.endswith(_DESCRIPTION)]
            raise not_found(path, self._not_served, described)
        exchange.add_headers({"allow": allowed})
        raise MillraceError(
            Reason.METHOD_NOT_ALLOWED, f"{path} does not take {exchange.method}; use {allowed}"
        )


def build_app(
    faces: Collection[Routes],
    callers: HttpCallers,
    counter: RequestCounter,
    authorizer: Authorizer,
    metrics: Metrics,
    deferred: Deferred,
    not_ready: Callable[[], str],
    limit_store: Callable[[], str],
) -> Application:
    """The application of one gateway process.

    `not_ready` says what is missing to serve, "" for nothing; `limit_store` how the shared limit store is, ""
    where there is none.
    """

    async def health(exchange: Exchange) -> None:
        missing = not_ready()
        page = HealthPage(
            status="unavailable" if missing else "ok",
            missing=missing or msgspec.UNSET,
            limit_store=limit_store() or msgspec.UNSET,
        )
        await exchange.respond(503 if missing else 200, msgspec.json.encode(page))

    async def expose(exchange: Exchange) -> None:
        # A page shows whatever ended before it was asked for.
        deferred.flush()
        body, content_type = metrics.expose(exchange.header(b"accept"))
        await exchange.respond(200, body, [(b"content-type", content_type.encode())])

    def ours(path: str, handler: Handler) -> Handler:
        for header, other in (face.by_header[path] for face in faces if path in face.by_header):
            handler = spoken(handler, header, other)
        return known(callers, counter, handler)

    public = {
        ("GET", "/health"): health,
        **{route: each for face in faces for route, each in face.public.items()},
    }
    asking = {route: ours(route[1], each) for face in faces for route, each in face.exact.items()}
    below = {
        start: (method, ours(start, each)) for face in faces for start, (method, each) in face.below.items()
    }
    return Application(
        {**asking, **public, ("GET", "/metrics"): expose},
        {AUTHORIZE_PREFIX: ("", partial(authorize, authorizer)), **below},
        partial(known, callers, counter),
        public=tuple(path for _, path in public),
        sockets={
            path: SocketRoute(open=each, checked=partial(known, callers, counter))
            for face in faces
            for path, each in face.sockets.items()
        },
        not_served={path: remedy for face in faces for path, remedy in face.not_served.items()},
        uploads={path: limit for face in faces for path, limit in face.uploads.items()},
    )
