"""Stored conversations: metadata, and items in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, delete, func, insert, select, update

from gateway.store.database import ROW_BYTES, StoreDatabase, StoredItem, not_found
from gateway.store.tables import CONVERSATIONS, ITEMS, MAX_ID

_C = CONVERSATIONS.c


class ConversationStore:
    """Conversations by tenant and id. Not for the event loop."""

    def __init__(self, database: StoreDatabase) -> None:
        self._database = database

    def create(self, tenant: str, resource: dict[str, Any], items: Sequence[StoredItem]) -> None:
        """Stores one, with its first items; raises STORE_FULL."""
        database, id_, body = self._database, resource["id"], msgspec.json.encode(resource)
        with database.writing(tenant) as connection:
            connection.execute(
                insert(CONVERSATIONS).values(
                    tenant=tenant,
                    id=id_,
                    expires_unix_ms=0,
                    next_position=0,
                    num_bytes=len(body) + ROW_BYTES,
                    body=database.seal(body, "conversation", tenant, id_),
                )
            )
            database.take(connection, tenant, len(body) + ROW_BYTES)
            extend(database, connection, tenant, id_, 0, items)

    def get(self, tenant: str, id_: str) -> dict[str, Any]:
        """The resource; raises STORED_NOT_FOUND."""
        with self._database.engine.connect() as connection:
            row = alive(self._database, connection, tenant, id_)
        return self._resource(row)

    def _resource(self, row: Row[Any]) -> dict[str, Any]:
        plain = self._database.open(row.body, "conversation", row.tenant, row.id)
        resource: dict[str, Any] = msgspec.json.decode(plain)
        return resource

    def update(self, tenant: str, id_: str, metadata: dict[str, str]) -> dict[str, Any]:
        """Replaces its metadata; returns the resource. Raises STORED_NOT_FOUND and STORE_FULL."""
        database = self._database
        with database.writing(tenant) as connection:
            row = alive(database, connection, tenant, id_)
            resource = {**self._resource(row), "metadata": metadata}
            body = msgspec.json.encode(resource)
            more = len(body) - len(database.open(row.body, "conversation", tenant, row.id))
            sealed = database.seal(body, "conversation", tenant, row.id)
            connection.execute(_own(tenant, row.id).values(body=sealed, num_bytes=_C.num_bytes + more))
            database.take(connection, tenant, more)
        return resource

    def delete(self, tenant: str, id_: str) -> None:
        """Removes it with its items; raises STORED_NOT_FOUND."""
        with self._database.writing(tenant) as connection:
            if not self._database.drop_conversation(connection, tenant, id_[:MAX_ID]):
                raise not_found("Conversation", id_)

    def append(self, tenant: str, id_: str, items: Sequence[StoredItem]) -> None:
        """Adds items; raises STORED_NOT_FOUND and STORE_FULL."""
        with self._database.writing(tenant) as connection:
            append(self._database, connection, tenant, id_, items)

    def items(
        self, tenant: str, id_: str, *, limit: int, order: str, after: str = ""
    ) -> tuple[list[StoredItem], bool]:
        """Some of its items; see `StoreDatabase.page`. Raises STORED_NOT_FOUND."""
        with self._database.engine.connect() as connection:
            alive(self._database, connection, tenant, id_)
        return self._database.page(tenant, id_, limit=limit, order=order, after=after)

    def item(self, tenant: str, id_: str, item_id: str) -> StoredItem:
        """One item; raises STORED_NOT_FOUND for it or for the conversation."""
        with self._database.engine.connect() as connection:
            alive(self._database, connection, tenant, id_)
            rows = connection.execute(select(ITEMS).where(*_item(tenant, id_, item_id)).limit(1)).all()
        for found in self._database.items(rows):
            return found
        raise not_found("Item", item_id)

    def delete_item(self, tenant: str, id_: str, item_id: str) -> dict[str, Any]:
        """Removes one item; returns the conversation's resource. Raises STORED_NOT_FOUND."""
        with self._database.writing(tenant) as connection:
            row = alive(self._database, connection, tenant, id_)
            mine = _item(tenant, row.id, item_id)
            size = connection.scalar(select(func.sum(ITEMS.c.num_bytes)).where(*mine))
            if connection.execute(delete(ITEMS).where(*mine)).rowcount == 0:
                raise not_found("Item", item_id)
            connection.execute(_own(tenant, row.id).values(num_bytes=_C.num_bytes - int(size or 0)))
            self._database.take(connection, tenant, -int(size or 0))
        return self._resource(row)

    def history(self, tenant: str, id_: str, *, max_bytes: int) -> tuple[list[StoredItem], bool]:
        """Its newest items up to `max_bytes`, oldest first, and whether there are more. Raises
        STORED_NOT_FOUND.
        """
        newest, num_bytes = list[StoredItem](), 0
        query = select(ITEMS).where(ITEMS.c.tenant == tenant, ITEMS.c.owner_id == id_[:MAX_ID])
        with self._database.engine.connect().execution_options(yield_per=64) as connection:
            alive(self._database, connection, tenant, id_, "conversation")
            for item in self._database.items(connection.execute(query.order_by(ITEMS.c.position.desc()))):
                num_bytes += len(item.body)
                if num_bytes > max_bytes:
                    return newest[::-1], True
                newest.append(item)
        return newest[::-1], False


def alive(
    database: StoreDatabase, connection: Connection, tenant: str, id_: str, field: str = ""
) -> Row[Any]:
    """A conversation's row, which has not expired; raises STORED_NOT_FOUND, at `field`."""
    found = connection.execute(
        select(CONVERSATIONS)
        .where(_C.tenant == tenant, _C.id == id_[:MAX_ID], _C.expires_unix_ms > database.now_ms())
        .with_for_update()
    ).one_or_none()
    if found is None:
        raise not_found("Conversation", id_, field)
    return found


def append(
    database: StoreDatabase, connection: Connection, tenant: str, id_: str, items: Sequence[StoredItem]
) -> None:
    """Adds items within a transaction; the conversation is kept anew. Raises STORED_NOT_FOUND, STORE_FULL."""
    extend(database, connection, tenant, id_, alive(database, connection, tenant, id_).next_position, items)


def extend(
    database: StoreDatabase,
    connection: Connection,
    tenant: str,
    id_: str,
    start: int,
    items: Sequence[StoredItem],
) -> None:
    """Writes items from a position on; raises STORE_FULL."""
    num_bytes = database.add_items(connection, tenant, id_, items, start=start)
    connection.execute(
        _own(tenant, id_).values(
            next_position=start + len(items),
            num_bytes=_C.num_bytes + num_bytes,
            expires_unix_ms=database.now_ms() + database.retention_ms,
        )
    )
    database.take(connection, tenant, num_bytes)


def _own(tenant: str, id_: str) -> Any:
    return update(CONVERSATIONS).where(_C.tenant == tenant, _C.id == id_)


def _item(tenant: str, id_: str, item_id: str) -> tuple[Any, ...]:
    return ITEMS.c.tenant == tenant, ITEMS.c.owner_id == id_[:MAX_ID], ITEMS.c.id == item_id[:MAX_ID]
