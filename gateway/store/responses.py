"""Stored responses: the resource, its input and output, and what it continues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import BigInteger, Connection, Row, cast, func, insert, literal, select, update

from contract.errors import invalid
from gateway.store.conversations import append
from gateway.store.database import ROW_BYTES, RUNNING, StoreDatabase, StoredItem, not_found
from gateway.store.tables import ITEMS, MAX_ID, RESPONSES

# What is used again is kept anew, at most so often.
_RENEWED_AFTER_MS = 1000
# Rows that one statement names; databases have limits.
_TOGETHER = 500


class _WithId(msgspec.Struct):
    id: str


_decode_id = msgspec.json.Decoder(_WithId).decode


class NewResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response to be stored. `resource` is the whole of it, its output included."""

    id: str
    resource: dict[str, Any]
    inputs: Sequence[StoredItem]
    previous_id: str = ""
    # The conversation that takes its input and output as its newest items.
    conversation_id: str = ""

    @property
    def outputs(self) -> list[StoredItem]:
        """Its output's items."""
        bodies = map(msgspec.json.encode, self.resource.get("output") or ())
        return [StoredItem(_decode_id(body).id, body) for body in bodies]


@dataclass(frozen=True, slots=True)
class History:
    """What came before, oldest first; `is_cut` where more is stored than was read."""

    items: list[StoredItem]
    is_cut: bool = False


class ResponseStore:
    """Responses by tenant and id. Not for the event loop."""

    def __init__(self, database: StoreDatabase) -> None:
        self._database = database

    def put(self, tenant: str, new: NewResponse) -> None:
        """Stores a response that has ended. Raises STORE_FULL, and STORED_NOT_FOUND where its conversation
        has been deleted meanwhile.
        """
        with self._database.writing(tenant) as connection:
            self.insert(connection, tenant, new)
            if new.conversation_id:
                append(self._database, connection, tenant, new.conversation_id, [*new.inputs, *new.outputs])

    def insert(
        self, connection: Connection, tenant: str, new: NewResponse, *, background: bool = False
    ) -> None:
        """A response's rows, within a transaction."""
        database, outputs = self._database, new.outputs
        body = encoded(new.resource)
        num_bytes = database.add_items(connection, tenant, new.id, new.inputs, start=0)
        num_bytes += database.add_items(
            connection, tenant, new.id, outputs, start=len(new.inputs), is_output=True
        )
        num_bytes += len(body) + ROW_BYTES
        connection.execute(
            insert(RESPONSES).values(
                tenant=tenant,
                id=new.id,
                previous_id=new.previous_id,
                status=str(new.resource.get("status", "")),
                is_background=int(background),
                expires_unix_ms=database.now_ms() + database.retention_ms,
                num_bytes=num_bytes,
                body=database.seal(body, "response", tenant, new.id),
            )
        )
        database.take(connection, tenant, num_bytes, keep=new.id)

    def get(self, tenant: str, id_: str) -> dict[str, Any]:
        """The resource; raises STORED_NOT_FOUND."""
        with self._database.engine.connect() as connection:
            return self.resource(connection, self.row(connection, tenant, id_))

    def row(self, connection: Connection, tenant: str, id_: str, *, kind: str = "Response") -> Row[Any]:
        """A response's row, which has not expired; raises STORED_NOT_FOUND."""
        found = connection.execute(
            select(RESPONSES).where(
                RESPONSES.c.tenant == tenant,
                RESPONSES.c.id == id_[:MAX_ID],
                RESPONSES.c.expires_unix_ms > self._database.now_ms(),
            )
        ).one_or_none()
        if found is None:
            raise not_found(kind, id_)
        return found

    def resource(self, connection: Connection, row: Row[Any]) -> dict[str, Any]:
        """The resource of a row, with its output."""
        plain = self._database.open(row.body, "response", row.tenant, row.id)
        resource: dict[str, Any] = msgspec.json.decode(plain)
        own = (ITEMS.c.tenant == row.tenant, ITEMS.c.owner_id == row.id, ITEMS.c.is_output == 1)
        rows = connection.execute(select(ITEMS).where(*own).order_by(ITEMS.c.position))
        resource["output"] = [msgspec.Raw(item.body) for item in self._database.items(rows)]
        return {**resource, "status": row.status}

    def delete(self, tenant: str, id_: str) -> None:
        """Removes it, with its items and events; one that is computed ends. Raises STORED_NOT_FOUND."""
        with self._database.writing(tenant) as connection:
            if not self._database.drop_response(connection, tenant, id_[:MAX_ID]):
                raise not_found("Response", id_)

    def input_items(
        self, tenant: str, id_: str, *, limit: int, order: str, after: str = ""
    ) -> tuple[list[StoredItem], bool]:
        """The items that the request brought; see `StoreDatabase.page`. Raises STORED_NOT_FOUND."""
        with self._database.engine.connect() as connection:
            self.row(connection, tenant, id_)
        return self._database.page(tenant, id_, limit=limit, order=order, after=after)

    def completed(self, tenant: str, after: str = "") -> list[str]:
        """Ids of responses that are whole and have not expired, in their order, from the one `after`; some of
        them, none at the end.
        """
        columns = RESPONSES.c
        query = (
            select(columns.id)
            .where(columns.tenant == tenant, columns.status == "completed", columns.id > after)
            .where(columns.expires_unix_ms > self._database.now_ms())
            .order_by(columns.id)
            .limit(_TOGETHER)
        )
        with self._database.engine.connect() as connection:
            return list(connection.execute(query).scalars())

    def history(self, tenant: str, id_: str, *, max_bytes: int, renew: bool = True) -> History:
        """Input and output of a response and of all that it continues, the newest of them up to `max_bytes`,
        and uses them: they are kept anew, unless `renew` is false.

        Raises STORED_NOT_FOUND where one of those is not there any more, and INVALID_ARGUMENT for a response
        that is still computed.
        """
        with self._database.engine.connect() as connection:
            chain = self._chain(connection, tenant, id_, max_bytes)
            if not chain:
                raise not_found("Previous response", id_, "previous_response_id")
            if chain[0].status in RUNNING:
                raise invalid("previous_response_id", "it is still computed; wait until it is complete")
            last = chain[-1]
            is_cut = bool(last.previous_id) and last.total >= max_bytes
            if last.previous_id and not is_cut:
                raise not_found("Previous response", last.previous_id, "previous_response_id")
            items: list[StoredItem] = []
            for link in reversed(chain):
                own = (ITEMS.c.tenant == tenant, ITEMS.c.owner_id == link.id)
                rows = connection.execute(select(ITEMS).where(*own).order_by(ITEMS.c.position))
                items += self._database.items(rows)
        if renew:
            self._renew(tenant, chain)
        return History(items, is_cut)

    def _chain(self, connection: Connection, tenant: str, id_: str, max_bytes: int) -> Sequence[Row[Any]]:
        """Rows of id, status, previous_id, expires_unix_ms and `total` bytes so far, the newest first."""
        columns = RESPONSES.c
        # Of the items alone: a resource with its tools, and events, are no part of a prompt.
        own = (ITEMS.c.tenant == columns.tenant, ITEMS.c.owner_id == columns.id)
        size = cast(
            select(func.coalesce(func.sum(ITEMS.c.num_bytes), 0)).where(*own).scalar_subquery(), BigInteger
        )
        picked = (columns.id, columns.status, columns.previous_id, columns.expires_unix_ms)
        alive = (columns.tenant == tenant, columns.expires_unix_ms > self._database.now_ms())
        first = select(*picked, size.label("total"), literal(0).label("depth"))
        chain = first.where(*alive, columns.id == id_[:MAX_ID]).cte("chain", recursive=True)
        further = select(
            *picked, (chain.c.total + size).label("total"), (chain.c.depth + 1).label("depth")
        ).where(*alive, columns.id == chain.c.previous_id, chain.c.total < max_bytes)
        chain = chain.union_all(further)
        return connection.execute(select(chain).order_by(chain.c.depth)).all()

    def _renew(self, tenant: str, chain: Sequence[Row[Any]]) -> None:
        until = self._database.now_ms() + self._database.retention_ms
        old = [row.id for row in chain if row.expires_unix_ms <= until - _RENEWED_AFTER_MS]
        for start in range(0, len(old), _TOGETHER):
            some = (RESPONSES.c.tenant == tenant, RESPONSES.c.id.in_(old[start : start + _TOGETHER]))
            with self._database.writing(tenant) as connection:
                connection.execute(update(RESPONSES).where(*some).values(expires_unix_ms=until))


def encoded(resource: dict[str, Any]) -> bytes:
    """A resource as it stands in its row: its output is in rows of its own."""
    return msgspec.json.encode({**resource, "output": []})
