"""What the parts of the store stand on: transactions, sealed rows, bytes by tenant, items in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, Table, delete, exists, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from contract.errors import MillraceError, Reason
from gateway.store.seal import OVERHEAD_BYTES, RowSeal
from gateway.store.tables import CONVERSATIONS, EVENTS, ITEMS, MAX_ID, RESPONSES, USED, WORK

# Bytes that a row is counted with, beside its body.
ROW_BYTES = 128 + OVERHEAD_BYTES
# Statuses of responses that are still computed.
RUNNING = ("queued", "in_progress")


class StoredItem(msgspec.Struct, frozen=True):
    """An item of a response or a conversation; `body` is its JSON, with the id in it."""

    id: str
    body: bytes


def not_found(kind: str, id_: str, field: str = "") -> MillraceError:
    """In the same words whether it is another tenant's, was deleted, has expired or never was."""
    return MillraceError(
        Reason.STORED_NOT_FOUND,
        f"{kind} with id '{id_[:MAX_ID]}' not found; stored state is kept by tenant and for a limited time",
        field=field,
    )


class StoreDatabase:
    """Not for the event loop: everything waits for the database."""

    def __init__(
        self,
        engine: Engine,
        seal: RowSeal,
        *,
        retention_s: float,
        max_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.engine = engine
        self.retention_ms = round(retention_s * 1000)
        self.max_bytes = max_bytes
        self._seal = seal
        self._clock = clock

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        return round(self._clock() * 1000)

    @contextmanager
    def writing(self, tenant: str = "") -> Iterator[Connection]:
        """A transaction that writes; of a tenant's, one at a time. Whoever locks more than one row names the
        tenant, whose row of used bytes is locked first: two that lock rows in different orders would wait
        for each other. SQLite's takes its one lock at once: one that had read before could not.
        """
        is_sqlite = self.engine.dialect.name == "sqlite"
        with self.engine.begin() as connection:
            if is_sqlite:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            if tenant:
                row, same = {"tenant": tenant, "num_bytes": 0}, {"num_bytes": USED.c.num_bytes}
                connection.execute(
                    sqlite.insert(USED)
                    .values(row)
                    .on_conflict_do_update(index_elements=["tenant"], set_=same)
                    if is_sqlite
                    else postgresql.insert(USED)
                    .values(row)
                    .on_conflict_do_update(index_elements=["tenant"], set_=same)
                )
            yield connection

    def seal(self, plain: bytes, *place: object) -> bytes:
        """See RowSeal; `place` is the table's name and the key of the row."""
        return self._seal.seal("/".join(map(str, place)), plain)

    def open(self, sealed: bytes, *place: object) -> bytes:
        """See RowSeal."""
        return self._seal.open("/".join(map(str, place)), sealed)

    # Bytes.

    def take(
        self, connection: Connection, tenant: str, num_bytes: int, *, keep: str = "", accepted: bool = False
    ) -> None:
        """Counts bytes, which may be negative, in a transaction of the tenant's. Where there are too many,
        the responses that were not used for longest go, of a chain the last one first; never one that is
        computed, nor the one named, nor what they continue. Raises STORE_FULL where that is not enough, save
        for what belongs to an answer that was `accepted`.
        """
        changed = update(USED).where(USED.c.tenant == tenant)
        connection.execute(changed.values(num_bytes=USED.c.num_bytes + num_bytes))
        used = connection.scalar(select(USED.c.num_bytes).where(USED.c.tenant == tenant)) or 0
        while num_bytes > 0 and used > self.max_bytes:
            freed = self._evict(connection, tenant, keep)
            if not freed and accepted:
                break
            if not freed:
                raise self.full(num_bytes)
            used -= freed

    def check_room(self, tenant: str, num_bytes: int) -> None:
        """Raises STORE_FULL where so many bytes would not fit beside the tenant's conversations."""
        query = select(func.sum(CONVERSATIONS.c.num_bytes)).where(CONVERSATIONS.c.tenant == tenant)
        with self.engine.connect() as connection:
            kept = int(connection.scalar(query) or 0)
        if kept + num_bytes > self.max_bytes:
            raise self.full(num_bytes)

    def full(self, num_bytes: int) -> MillraceError:
        """STORE_FULL for so many bytes."""
        return MillraceError(
            Reason.STORE_FULL,
            f"{num_bytes} bytes do not fit into the {self.max_bytes} bytes that are stored of a tenant "
            "(gateway.store.max_bytes); delete responses or conversations, or send store false",
            metadata={"limit_bytes": str(self.max_bytes)},
        )

    def _evict(self, connection: Connection, tenant: str, keep: str) -> int:
        """Removes the response that was not used for longest, of those that no other one continues: without
        what it continues a response is of no use. Returns its bytes, 0 where there is none.
        """
        columns, following = RESPONSES.c, RESPONSES.alias()
        is_continued = exists().where(following.c.tenant == tenant, following.c.previous_id == columns.id)
        oldest = (
            select(columns.id, columns.num_bytes)
            .where(columns.tenant == tenant, columns.id != keep, columns.status.not_in(RUNNING))
            .where(~is_continued)
            .order_by(columns.expires_unix_ms, columns.id)
            .limit(1)
        )
        for id_, size in connection.execute(oldest).all():
            self.drop_response(connection, tenant, id_)
            return int(size)
        return 0

    # Rows that go together.

    def drop_response(self, connection: Connection, tenant: str, id_: str) -> bool:
        """Removes a response with all that belongs to it; whether there was one. The work is the same."""
        size = connection.scalar(
            select(RESPONSES.c.num_bytes).where(RESPONSES.c.tenant == tenant, RESPONSES.c.id == id_)
        )
        for table, column in ((ITEMS, "owner_id"), (EVENTS, "response_id"), (WORK, "response_id")):
            connection.execute(delete(table).where(table.c.tenant == tenant, table.c[column] == id_))
        return self._drop(connection, RESPONSES, tenant, id_, size or 0)

    def drop_conversation(self, connection: Connection, tenant: str, id_: str) -> bool:
        """Removes a conversation with its items; whether there was one."""
        size = connection.scalar(
            select(CONVERSATIONS.c.num_bytes).where(
                CONVERSATIONS.c.tenant == tenant, CONVERSATIONS.c.id == id_
            )
        )
        connection.execute(delete(ITEMS).where(ITEMS.c.tenant == tenant, ITEMS.c.owner_id == id_))
        return self._drop(connection, CONVERSATIONS, tenant, id_, size or 0)

    def _drop(self, connection: Connection, table: Table, tenant: str, id_: str, size: int) -> bool:
        gone = connection.execute(delete(table).where(table.c.tenant == tenant, table.c.id == id_))
        less = update(USED).where(USED.c.tenant == tenant).values(num_bytes=USED.c.num_bytes - size)
        connection.execute(less)
        return gone.rowcount > 0

    # Items.

    def add_items(
        self,
        connection: Connection,
        tenant: str,
        owner_id: str,
        items: Sequence[StoredItem],
        *,
        start: int,
        is_output: bool = False,
    ) -> int:
        """Writes items from a position on; returns the bytes that they count."""
        rows: list[dict[str, Any]] = [
            {
                "tenant": tenant,
                "owner_id": owner_id,
                "position": position,
                "id": item.id,
                "is_output": int(is_output),
                "num_bytes": len(item.body) + ROW_BYTES,
                "body": self.seal(item.body, "item", tenant, owner_id, position),
            }
            for position, item in enumerate(items, start)
        ]
        if rows:
            connection.execute(insert(ITEMS), rows)
        return sum(int(row["num_bytes"]) for row in rows)

    def items(self, rows: Iterable[Any]) -> Iterator[StoredItem]:
        """Rows of ITEMS, opened one by one."""
        for row in rows:
            place = ("item", row.tenant, row.owner_id, row.position)
            yield StoredItem(row.id, self.open(row.body, *place))

    def page(
        self, tenant: str, owner_id: str, *, limit: int, order: str, after: str = "", is_output: bool = False
    ) -> tuple[list[StoredItem], bool]:
        """Items of one owner behind the one named `after`, "asc" or "desc", and whether there are more.

        Raises STORED_NOT_FOUND where there is no such item.
        """
        columns = ITEMS.c
        own = (columns.tenant == tenant, columns.owner_id == owner_id, columns.is_output == int(is_output))
        query = select(ITEMS).where(*own)
        with self.engine.connect() as connection:
            if after:
                start = connection.scalar(select(func.min(columns.position)).where(*own, columns.id == after))
                if start is None:
                    raise not_found("Item", after, "after")
                query = query.where(columns.position > start if order == "asc" else columns.position < start)
            ordered = columns.position if order == "asc" else columns.position.desc()
            rows = connection.execute(query.order_by(ordered).limit(limit + 1)).all()
        return list(self.items(rows[:limit])), len(rows) > limit

    def find_items(self, tenant: str, ids: Sequence[str]) -> dict[str, StoredItem]:
        """Items of a tenant by their ids, wherever they stand; those that are not there are left out."""
        found: dict[str, StoredItem] = {}
        now = self.now_ms()
        with self.engine.connect() as connection:
            for id_ in dict.fromkeys(ids):
                alive = [
                    select(ITEMS).join(
                        owner,
                        (owner.c.tenant == ITEMS.c.tenant)
                        & (owner.c.id == ITEMS.c.owner_id)
                        & (owner.c.expires_unix_ms > now),
                    )
                    for owner in (RESPONSES, CONVERSATIONS)
                ]
                for query in alive:
                    own = query.where(ITEMS.c.tenant == tenant, ITEMS.c.id == id_[:MAX_ID]).limit(1)
                    found.update((item.id, item) for item in self.items(connection.execute(own).all()))
        return found
