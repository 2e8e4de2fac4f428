"""Handlers of stored responses: get, follow, cancel, delete, and what they were asked with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from contract.errors import MillraceError, Reason, invalid, unsupported
from gateway.faces.responses.background import cancelled, follow
from gateway.faces.responses.keeping import store_of
from gateway.faces.responses.writer import DONE
from gateway.http.errors import not_found
from gateway.http.exchange import Exchange
from gateway.store.database import StoredItem
from gateway.store.store import Store

PREFIX = "/v1/responses/"
MAX_LIMIT, _DEFAULT_LIMIT = 100, 20
_encode = msgspec.json.Encoder().encode


class Gone(Exception):
    """The client has left."""


class StoredEndpoints:
    """Handlers of /v1/responses/{id} and what is below it."""

    def __init__(self, store: Store | None) -> None:
        self._store = store

    async def handle(self, exchange: Exchange) -> None:
        """Any method, for any path below /v1/responses/ that has no handler of its own."""
        id_, _, part = exchange.path.removeprefix(PREFIX).partition("/")
        handlers = {
            "": {"GET": self._get, "DELETE": self._delete},
            "cancel": {"POST": self._cancel},
            "input_items": {"GET": self._input_items},
        }
        await dispatch(exchange, handlers.get(part), id_)

    async def _get(self, exchange: Exchange, id_: str) -> None:
        store, tenant = store_of(exchange, self._store, "Response", id_)
        query = Query(exchange, ("stream", "starting_after", *INCLUDES))
        stream, after = query.flag("stream"), query.number("starting_after", -1, least=0)
        if after >= 0 and not stream:
            raise invalid("starting_after", "it is only allowed with stream true")
        if stream:
            await stream_events(exchange, store, tenant, id_, after)
            return
        await exchange.respond(200, _encode(await store.call(store.responses.get, tenant, id_)))

    async def _delete(self, exchange: Exchange, id_: str) -> None:
        store, tenant = store_of(exchange, self._store, "Response", id_)
        Query(exchange, ())
        await store.call(store.responses.delete, tenant, id_)
        await exchange.respond(200, _encode({"id": id_, "object": "response", "deleted": True}))

    async def _cancel(self, exchange: Exchange, id_: str) -> None:
        store, tenant = store_of(exchange, self._store, "Response", id_)
        Query(exchange, ())
        resource = await store.call(store.background.cancel, tenant, id_, cancelled)
        await exchange.respond(200, _encode(resource))

    async def _input_items(self, exchange: Exchange, id_: str) -> None:
        store, tenant = store_of(exchange, self._store, "Response", id_)
        page = Query(exchange, (*PAGE, *INCLUDES)).page()
        items, more = await store.call(store.responses.input_items, tenant, id_, **page)
        await exchange.respond(200, listed(items, more))


# Names in a query: of pages, and of parts of answers that are there in any case.
PAGE = ("limit", "order", "after")
INCLUDES = ("include", "include[]", "include_obfuscation")


class Query:
    """The query of a request, whose names are known; raises UNSUPPORTED_FIELD for others."""

    def __init__(self, exchange: Exchange, known: Sequence[str]) -> None:
        self._values = dict(parse_qsl(exchange.query, keep_blank_values=True))
        for name in self._values:
            if name not in known:
                raise unsupported(name, f"use {', '.join(known) or 'none'}", "no parameter of this path")

    def flag(self, name: str) -> bool:
        """Whether it is true; raises INVALID_ARGUMENT for what is no truth value."""
        value = self._values.get(name, "false").lower()
        if value not in ("true", "false"):
            raise invalid(name, f"{value[:20]!r} is neither true nor false")
        return value == "true"

    def number(self, name: str, otherwise: int, *, least: int = 1, most: int = 2**53) -> int:
        """A number; raises INVALID_ARGUMENT."""
        text = self._values.get(name)
        if text is None:
            return otherwise
        if not (text.isascii() and text.isdigit() and len(text) <= 16 and least <= int(text) <= most):
            raise invalid(name, f"{text[:20]!r} is no number from {least} to {most}")
        return int(text)

    def page(self) -> dict[str, Any]:
        """Which items are asked for."""
        order = self._values.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid("order", f"{order[:20]!r} is not one of asc, desc")
        limit = self.number("limit", _DEFAULT_LIMIT, most=MAX_LIMIT)
        return {"limit": limit, "order": order, "after": self._values.get("after", "")}


async def dispatch(exchange: Exchange, handlers: Mapping[str, Any] | None, *names: str) -> None:
    """Has the handler of the method answer; raises ROUTE_NOT_FOUND and METHOD_NOT_ALLOWED."""
    if handlers is None or not all(names):
        raise not_found(exchange.path, {})
    method = "GET" if exchange.method == "HEAD" else exchange.method
    if method not in handlers:
        allowed = ", ".join(handlers)
        exchange.add_headers({"allow": allowed})
        message = f"{exchange.path} does not take {exchange.method}; use {allowed}"
        raise MillraceError(Reason.METHOD_NOT_ALLOWED, message)
    await handlers[method](exchange, *names)


def listed(items: Sequence[StoredItem], more: bool) -> bytes:
    """A page of items."""
    return _encode(
        {
            "object": "list",
            "data": [msgspec.Raw(each.body) for each in items],
            "first_id": items[0].id if items else None,
            "last_id": items[-1].id if items else None,
            "has_more": more,
        }
    )


async def stream_events(exchange: Exchange, store: Store, tenant: str, id_: str, after: int) -> None:
    """The events of a background response as they were told first, and as they come."""

    async def write(events: bytes) -> None:
        if exchange.client_gone:
            raise Gone
        if not exchange.begun:
            await exchange.begin_events()
        await exchange.write(events)

    exchange.watch_client(lambda: None)
    try:
        await follow(store, tenant, id_, after, write)
        await exchange.end_events(DONE)
    except Gone:
        # The response goes on without it.
        pass
    except MillraceError:
        if not exchange.begun:
            raise
        # It was deleted meanwhile.
        await exchange.end_events(DONE)
    finally:
        exchange.unwatch()
