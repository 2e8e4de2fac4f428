"""Responses that are computed without a connection: their events, and who computes them.

A gateway holds a lease on each, which every write renews. One that is silent for longer has lost it to
another gateway, and what it writes after that is refused: of a response there is one stream of events.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from sqlalchemy import Connection, delete, func, insert, select, update

from contract.errors import invalid
from gateway.store.conversations import append
from gateway.store.database import ROW_BYTES, RUNNING, StoreDatabase, StoredItem
from gateway.store.responses import NewResponse, ResponseStore, encoded
from gateway.store.seal import SealBroken
from gateway.store.tables import EVENTS, ITEMS, MAX_ID, RESPONSES, WORK

_log = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[bytes]).decode
# Rows of events that are read at a time.
_ROWS = 32


# Of a resource and the events so far: the resource as it ends, and its last events.
Ending: TypeAlias = Callable[[dict[str, Any], Sequence[bytes]], tuple[dict[str, Any], list[bytes]]]


class LeaseLost(Exception):
    """The response was cancelled or deleted, or another gateway computes it."""


@dataclass(frozen=True, slots=True)
class BackgroundWork:
    """A response to be computed: what its gateway has put down, and how far its events are."""

    tenant: str
    response_id: str
    body: bytes
    # Who computes it: a name of this time that it is computed, like no other.
    owner: str
    num_events: int = 0
    last_event: bytes = b""
    # Gateways that have had it, this one included.
    num_owners: int = 1


class BackgroundStore:
    """Background responses. Not for the event loop."""

    def __init__(self, database: StoreDatabase, responses: ResponseStore, lease_s: float) -> None:
        self._database = database
        self._responses = responses
        self._lease_ms = round(lease_s * 1000)

    def create(self, tenant: str, new: NewResponse, body: bytes) -> BackgroundWork:
        """Stores a response that is computed from now on, and takes the lease; raises STORE_FULL."""
        database, work = self._database, BackgroundWork(tenant, new.id, body, _owner())
        with database.writing(tenant) as connection:
            self._responses.insert(connection, tenant, new, background=True)
            connection.execute(
                insert(WORK).values(
                    tenant=tenant,
                    response_id=new.id,
                    owner=work.owner,
                    lease_until_unix_ms=self._until(),
                    num_owners=work.num_owners,
                    body=database.seal(body, "work", tenant, new.id),
                )
            )
            self._count(connection, tenant, new.id, len(body) + ROW_BYTES)
        return work

    def add(self, work: BackgroundWork, first: int, events: Sequence[bytes]) -> None:
        """Appends events, the first one with this sequence number; renews the lease. Raises LeaseLost."""
        with self._database.writing(work.tenant if events else "") as connection:
            self._hold(connection, work)
            if events:
                self._write(connection, work, first, events)

    def _hold(self, connection: Connection, work: BackgroundWork) -> None:
        renewed = update(WORK).where(*_work(work.tenant, work.response_id), WORK.c.owner == work.owner)
        if connection.execute(renewed.values(lease_until_unix_ms=self._until())).rowcount == 0:
            raise LeaseLost

    def _write(
        self, connection: Connection, work: BackgroundWork, first: int, events: Sequence[bytes]
    ) -> None:
        body, place = _encode(list(events)), ("events", work.tenant, work.response_id, first)
        connection.execute(
            insert(EVENTS).values(
                tenant=work.tenant,
                response_id=work.response_id,
                first=first,
                num_events=len(events),
                body=self._database.seal(body, *place),
            )
        )
        self._count(connection, work.tenant, work.response_id, len(body) + ROW_BYTES)

    def finish(
        self,
        work: BackgroundWork,
        resource: dict[str, Any],
        first: int,
        events: Sequence[bytes],
        conversation: str = "",
    ) -> None:
        """Its last events and what became of it, which `conversation` takes as its newest items; raises
        LeaseLost.
        """
        with self._database.writing(work.tenant) as connection:
            self._hold(connection, work)
            if events:
                self._write(connection, work, first, events)
            outputs = self._end(connection, work.tenant, work.response_id, resource)
            if conversation:
                own = (ITEMS.c.tenant == work.tenant, ITEMS.c.owner_id == work.response_id)
                inputs = select(ITEMS).where(*own, ITEMS.c.is_output == 0).order_by(ITEMS.c.position)
                items = [*self._database.items(connection.execute(inputs)), *outputs]
                append(self._database, connection, work.tenant, conversation, items)

    def _end(
        self, connection: Connection, tenant: str, id_: str, resource: dict[str, Any]
    ) -> list[StoredItem]:
        database = self._database
        outputs = NewResponse(id=id_, resource=resource, inputs=()).outputs
        own = (ITEMS.c.tenant == tenant, ITEMS.c.owner_id == id_)
        start = connection.scalar(select(func.max(ITEMS.c.position)).where(*own))
        start = 0 if start is None else start + 1
        num_bytes = database.add_items(connection, tenant, id_, outputs, start=start, is_output=True)
        work = connection.scalar(
            select(func.length(WORK.c.body)).where(WORK.c.tenant == tenant, WORK.c.response_id == id_)
        )
        connection.execute(delete(WORK).where(*_work(tenant, id_)))
        body = encoded(resource)
        connection.execute(
            update(RESPONSES)
            .where(RESPONSES.c.tenant == tenant, RESPONSES.c.id == id_)
            .values(status=resource["status"], body=database.seal(body, "response", tenant, id_))
        )
        self._count(connection, tenant, id_, num_bytes - int(work or 0))
        return outputs

    def release(self, work: BackgroundWork) -> None:
        """Leaves it to another gateway at once."""
        with self._database.writing() as connection:
            mine = update(WORK).where(*_work(work.tenant, work.response_id), WORK.c.owner == work.owner)
            # Whoever finds it did not lose its last gateway to it.
            left = mine.values(owner="", lease_until_unix_ms=0, num_owners=WORK.c.num_owners - 1)
            connection.execute(left)

    def take_over(self, limit: int) -> list[BackgroundWork]:
        """Takes leases that have run out, of other gateways or of this one before it was interrupted."""
        now = self._database.now_ms()
        with self._database.engine.connect() as connection:
            waiting = (
                select(WORK).where(WORK.c.lease_until_unix_ms < now).order_by(WORK.c.lease_until_unix_ms)
            )
            rows = connection.execute(waiting.limit(limit)).all()
        taken = []
        for row in rows:
            try:
                work = self._take(row)
            except SealBroken:
                self._give_up(row)
            else:
                taken += [work] if work is not None else []
        return taken

    def _give_up(self, row: Any) -> None:
        """Ends what nobody can compute, because the key that it was sealed with is gone."""
        _log.error("background response %s cannot be read any more, and fails", row.response_id)
        with self._database.writing(row.tenant) as connection:
            connection.execute(delete(WORK).where(*_work(row.tenant, row.response_id)))
            own = (RESPONSES.c.tenant == row.tenant, RESPONSES.c.id == row.response_id)
            connection.execute(update(RESPONSES).where(*own).values(status="failed"))

    def _take(self, row: Any) -> BackgroundWork | None:
        database, owner = self._database, _owner()
        with database.writing() as connection:
            taken = update(WORK).where(
                *_work(row.tenant, row.response_id),
                WORK.c.lease_until_unix_ms == row.lease_until_unix_ms,
                WORK.c.owner == row.owner,
            )
            mine = taken.values(
                owner=owner, lease_until_unix_ms=self._until(), num_owners=WORK.c.num_owners + 1
            )
            if connection.execute(mine).rowcount == 0:
                return None
            own = (EVENTS.c.tenant == row.tenant, EVENTS.c.response_id == row.response_id)
            last = connection.execute(
                select(EVENTS).where(*own).order_by(EVENTS.c.first.desc()).limit(1)
            ).one_or_none()
        body = database.open(row.body, "work", row.tenant, row.response_id)
        events = [] if last is None else self._events(last)
        num_events = 0 if last is None else last.first + last.num_events
        last_event = events[-1] if events else b""
        return BackgroundWork(
            row.tenant, row.response_id, body, owner, num_events, last_event, row.num_owners + 1
        )

    def _events(self, row: Any) -> list[bytes]:
        return _decode(self._database.open(row.body, "events", row.tenant, row.response_id, row.first))

    def cancel(self, tenant: str, id_: str, ending: Ending) -> dict[str, Any]:
        """Ends it, whoever computes it, with the events and the resource that `ending` makes of what is there
        of it, and returns the resource; one that has ended stays as it is. Raises STORED_NOT_FOUND, and
        INVALID_ARGUMENT for one that is not computed in the background.
        """
        with self._database.writing(tenant) as connection:
            row = self._responses.row(connection, tenant, id_)
            resource = self._responses.resource(connection, row)
            if not row.is_background:
                raise invalid("response_id", "only a response with background true can be cancelled")
            if row.status in RUNNING:
                own = (EVENTS.c.tenant == tenant, EVENTS.c.response_id == row.id)
                rows = connection.execute(select(EVENTS).where(*own).order_by(EVENTS.c.first)).all()
                written = [event for each in rows for event in self._events(each)]
                resource, events = ending(resource, written)
                work = BackgroundWork(tenant, row.id, b"", "")
                self._write(connection, work, len(written), events)
                self._end(connection, tenant, row.id, resource)
        return resource

    def events(self, tenant: str, id_: str, after: int) -> tuple[list[bytes], bool]:
        """Events with sequence numbers above `after`, some at a time, and whether there will be no more of
        them. Raises STORED_NOT_FOUND, and INVALID_ARGUMENT for a response of which no events are kept.
        """
        with self._database.engine.connect() as connection:
            row = self._responses.row(connection, tenant, id_)
            if not row.is_background:
                raise invalid("stream", "events are kept of responses with background true; leave it out")
            columns = EVENTS.c
            own = (columns.tenant == tenant, columns.response_id == row.id)
            later = select(EVENTS).where(*own, columns.first + columns.num_events > after + 1)
            rows = connection.execute(later.order_by(columns.first).limit(_ROWS)).all()
        found = [
            event
            for each in rows
            for sequence, event in enumerate(self._events(each), each.first)
            if sequence > after
        ]
        return found, row.status not in RUNNING and len(rows) < _ROWS

    def _count(self, connection: Connection, tenant: str, id_: str, num_bytes: int) -> None:
        mine = (RESPONSES.c.tenant == tenant, RESPONSES.c.id == id_)
        more = RESPONSES.c.num_bytes + num_bytes
        connection.execute(update(RESPONSES).where(*mine).values(num_bytes=more))
        self._database.take(connection, tenant, num_bytes, keep=id_, accepted=True)

    def _until(self) -> int:
        return self._database.now_ms() + self._lease_ms


def _owner() -> str:
    return secrets.token_hex(8)


def _work(tenant: str, id_: str) -> tuple[Any, ...]:
    return WORK.c.tenant == tenant, WORK.c.response_id == id_[:MAX_ID]
