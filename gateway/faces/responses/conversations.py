"""Handlers of /v1/conversations: conversations that are kept, and their items."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from contract.errors import invalid
from gateway.faces.bodies import Tolerance, read
from gateway.faces.queries import PAGE, Query, dispatch
from gateway.faces.responses.items import ITEM_TOLERANCE, InputItem, messages_of
from gateway.faces.responses.keeping import kept_by, store_of, stored_items
from gateway.faces.responses.stored import INCLUDES, listed
from gateway.http.exchange import Exchange
from gateway.intake.intake import Intake
from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.validate import check_metadata
from gateway.store.database import StoredItem
from gateway.store.store import Store

CONVERSATIONS = "/v1/conversations"
# Items that one request may bring, as OpenAI has it.
MAX_ITEMS = 20
_encode = msgspec.json.Encoder().encode


class ConversationBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a conversation that is made or changed."""

    metadata: dict[str, str] | None = None
    items: list[InputItem] | None = None


class ItemsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request that adds items."""

    items: list[InputItem]


_CONVERSATION_DECODER = msgspec.json.Decoder(ConversationBody)
_ITEMS_DECODER = msgspec.json.Decoder(ItemsBody)
_TOLERANCE = Tolerance({"items": InputItem}, ITEM_TOLERANCE.inside)


class ConversationEndpoints:
    """Handlers of /v1/conversations and what is below it. `unseal` makes what opens a tenant's texts."""

    def __init__(
        self, pipeline: Callable[[], Pipeline], store: Store | None, unseal: Callable[[str], Any]
    ) -> None:
        self._pipeline = pipeline
        self._store = store
        self._unseal = unseal

    async def create(self, exchange: Exchange) -> None:
        """POST /v1/conversations."""
        tenant = exchange.verified_caller.identity.tenant
        store = kept_by(self._store, tenant, "conversation")
        id_ = f"conv_{secrets.token_hex(24)}"
        body, items = await self._read(exchange, _CONVERSATION_DECODER, id_)
        check_metadata(body.metadata or {})
        resource = {
            "id": id_,
            "object": "conversation",
            "created_at": int(time.time()),
            "metadata": body.metadata or {},
        }
        await store.call(store.conversations.create, tenant, resource, items)
        await exchange.respond(200, _encode(resource))

    async def handle(self, exchange: Exchange) -> None:
        """Any method, below /v1/conversations/."""
        id_, _, part = exchange.path.removeprefix(f"{CONVERSATIONS}/").partition("/")
        part, _, item_id = part.partition("/")
        if part == "":
            handlers = {"GET": self._get, "POST": self._update, "DELETE": self._delete}
            await dispatch(exchange, handlers, id_)
        elif part == "items" and not item_id:
            await dispatch(exchange, {"GET": self._items, "POST": self._add}, id_)
        else:
            of_item = {"GET": self._item, "DELETE": self._delete_item}
            await dispatch(exchange, of_item if part == "items" else None, id_, item_id)

    async def _get(self, exchange: Exchange, id_: str) -> None:
        store, tenant = store_of(exchange, self._store, "Conversation", id_)
        Query(exchange, ())
        await exchange.respond(200, _encode(await store.call(store.conversations.get, tenant, id_)))

    async def _update(self, exchange: Exchange, id_: str) -> None:
        store, tenant = store_of(exchange, self._store, "Conversation", id_)
        body, items = await self._read(exchange, _CONVERSATION_DECODER, id_)
        if items or body.metadata is None:
            raise invalid("metadata", f"it alone can be changed here; items go to {exchange.path}/items")
        check_metadata(body.metadata)
        changed = await store.call(store.conversations.update, tenant, id_, body.metadata)
        await exchange.respond(200, _encode(changed))

    async def _delete(self, exchange: Exchange, id_: str) -> None:
        store, tenant = store_of(exchange, self._store, "Conversation", id_)
        Query(exchange, ())
        await store.call(store.conversations.delete, tenant, id_)
        gone = {"id": id_, "object": "conversation.deleted", "deleted": True}
        await exchange.respond(200, _encode(gone))

    async def _items(self, exchange: Exchange, id_: str) -> None:
        store, tenant = store_of(exchange, self._store, "Conversation", id_)
        page = Query(exchange, (*PAGE, *INCLUDES)).page()
        items, more = await store.call(store.conversations.items, tenant, id_, **page)
        await exchange.respond(200, listed(items, more))

    async def _add(self, exchange: Exchange, id_: str) -> None:
        store, tenant = store_of(exchange, self._store, "Conversation", id_)
        Query(exchange, INCLUDES)
        _, items = await self._read(exchange, _ITEMS_DECODER, secrets.token_hex(16))
        await store.call(store.conversations.append, tenant, id_, items)
        await exchange.respond(200, listed(items, more=False))

    async def _item(self, exchange: Exchange, id_: str, item_id: str) -> None:
        store, tenant = store_of(exchange, self._store, "Conversation", id_)
        Query(exchange, INCLUDES)
        found = await store.call(store.conversations.item, tenant, id_, item_id)
        await exchange.respond(200, found.body)

    async def _delete_item(self, exchange: Exchange, id_: str, item_id: str) -> None:
        store, tenant = store_of(exchange, self._store, "Conversation", id_)
        Query(exchange, ())
        left = await store.call(store.conversations.delete_item, tenant, id_, item_id)
        await exchange.respond(200, _encode(left))

    async def _read(
        self, exchange: Exchange, decoder: msgspec.json.Decoder[Any], name: str
    ) -> tuple[Any, list[StoredItem]]:
        """The body and its items, which could be a prompt."""
        intake: Intake = self._pipeline().intake
        convert = partial(self._checked, exchange.verified_caller.identity.tenant, name)
        return await read(exchange, intake, decoder, convert, _TOLERANCE)

    def _checked(self, tenant: str, name: str, body: ConversationBody | ItemsBody) -> list[StoredItem]:
        given = body.items or []
        if len(given) > MAX_ITEMS:
            raise invalid("items", f"there are {len(given)}; a request may add {MAX_ITEMS}, so send several")
        # Raises what a request with these items would be refused with.
        messages_of(given, None, self._unseal(tenant), "items")
        return stored_items(given, name.removeprefix("conv_"))
