"""Handlers of stored responses: get, follow, cancel, delete, and what they were asked with."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from contract.errors import MillraceError, invalid
from gateway.faces.queries import PAGE, Query, dispatch
from gateway.faces.responses.background import cancelled, follow
from gateway.faces.responses.keeping import store_of
from gateway.faces.responses.writer import DONE
from gateway.http.exchange import Exchange
from gateway.store.database import StoredItem
from gateway.store.store import Store

PREFIX = "/v1/responses/"
# Names of a query of parts of answers that are there in any case.
INCLUDES = ("include", "include[]", "include_obfuscation")
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
