"""What is known of files and batches, by tenant: rows, bounds, leases.

A gateway holds a lease on each batch that it runs, which every write renews. Nothing here may be called from
the event loop.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, Row, delete, func, insert, select, update

from contract.errors import MillraceError, Reason
from gateway.batches.tables import BATCHES, FILES, MAX_ID
from gateway.batches.types import BatchStatus, RequestBatch
from gateway.config import BatchesConfig
from gateway.store.seal import RowSeal, SealBroken

_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(RequestBatch).decode
_RUNNING = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
# When a file expired that was deleted; 0 is never.
_LONG_AGO = 1
# Before an encrypted row; JSON does not begin with it.
_SEALED = b"\0"


class BatchLeaseLost(Exception):
    """Another gateway runs the batch, or it was deleted."""


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a tenant's. Moments are milliseconds since the Unix epoch, 0 for no end."""

    id: str
    purpose: str
    filename: str
    num_bytes: int
    is_sealed: bool = False
    created_unix_ms: int
    expires_unix_ms: int = 0


class BatchLease(msgspec.Struct):
    """A batch that a gateway runs; `owner` is a name of this time that it is run, like no other."""

    tenant: str
    batch: RequestBatch
    owner: str
    # When somebody asked for its end, seconds since the Unix epoch; 0 as long as nobody did.
    cancelled_unix_s: int = 0


def not_found(kind: str, id_: str, field: str = "") -> MillraceError:
    """In the same words whether it is another tenant's, was deleted, has expired or never was."""
    return MillraceError(
        Reason.STORED_NOT_FOUND,
        f"no such {kind}: {id_[:MAX_ID]!r}; it is kept by tenant and for a limited time",
        field=field,
    )


class BatchStore:
    """Files and batches of one deployment."""

    def __init__(
        self,
        engine: Engine,
        config: BatchesConfig,
        seal: RowSeal | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.engine = engine
        self.config = config
        self._seal = seal
        self._clock = clock

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        return round(self._clock() * 1000)

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        with self.engine.begin() as connection:
            if self.engine.dialect.name == "sqlite":
                # One that had read before could not take the lock.
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield connection

    def _encoded(self, tenant: str, batch: RequestBatch) -> bytes:
        plain = _encode(batch)
        if self._seal is None:
            return plain
        return _SEALED + self._seal.seal(_place(tenant, batch.id), plain)

    def _decoded(self, row: Row[Any]) -> RequestBatch:
        """Raises SealBroken."""
        body = bytes(row.body)
        if body.startswith(_SEALED):
            if self._seal is None:
                raise SealBroken("batches are encrypted, and gateway.batches.key_file names no key")
            body = self._seal.open(_place(row.tenant, row.id), body.removeprefix(_SEALED))
        return _decode(body)

    # Files.

    def check_room(self, tenant: str, num_bytes: int) -> None:
        """Raises STORE_FULL where a file of so many bytes is beyond what a tenant may have."""
        with self.engine.connect() as connection:
            self._check_room(connection, tenant, num_bytes)

    def _check_room(self, connection: Connection, tenant: str, num_bytes: int) -> None:
        sums = select(func.count(), func.coalesce(func.sum(FILES.c.num_bytes), 0))
        num_files, used = connection.execute(sums.where(FILES.c.tenant == tenant)).one()
        config = self.config
        if num_files >= config.max_files:
            raise _full(f"you have {num_files} files; the limit is {config.max_files}", "max_files")
        if int(used) + num_bytes > config.max_bytes:
            have = f"your files have {used} bytes; with these {num_bytes} they would be over"
            raise _full(f"{have} the limit of {config.max_bytes}", "max_bytes")

    def add_file(self, tenant: str, file: StoredFile, *, is_result: bool = False) -> None:
        """Adds a file whose content is there; raises STORE_FULL, but not for a batch's results. One that is
        there already stays as it is.
        """
        with self._writing() as connection:
            own = (FILES.c.tenant == tenant, FILES.c.id == file.id)
            if connection.scalar(select(func.count()).select_from(FILES).where(*own)):
                return
            if not is_result:
                self._check_room(connection, tenant, file.num_bytes)
            connection.execute(insert(FILES).values(tenant=tenant, **msgspec.structs.asdict(file)))

    def file(self, tenant: str, id_: str, field: str = "") -> StoredFile:
        """Raises STORED_NOT_FOUND, at `field`."""
        with self.engine.connect() as connection:
            row = connection.execute(select(FILES).where(*self._alive(tenant), FILES.c.id == id_[:MAX_ID]))
            found = row.one_or_none()
        if found is None:
            raise not_found("file", id_, field)
        return _file(found)

    def files(
        self, tenant: str, purposes: Sequence[str], *, limit: int, order: str, after: str = ""
    ) -> tuple[list[StoredFile], bool]:
        """Files of some purposes behind the one named `after`, "asc" or "desc", and whether there are more.
        Raises STORED_NOT_FOUND where there is no such file.
        """
        query = select(FILES).where(*self._alive(tenant), FILES.c.purpose.in_(purposes))
        rows, more = self._page(FILES, query, tenant, limit=limit, order=order, after=after)
        return [_file(row) for row in rows], more

    def delete_file(self, tenant: str, id_: str) -> None:
        """Lets nobody see a file any more, which `forget` then removes; raises STORED_NOT_FOUND, and
        INVALID_ARGUMENT for the input of an open batch.
        """
        with self._writing() as connection:
            user = connection.scalar(
                select(BATCHES.c.id).where(
                    BATCHES.c.tenant == tenant, BATCHES.c.input_file_id == id_, BATCHES.c.is_open == 1
                )
            )
            if user is not None:
                raise MillraceError(
                    Reason.INVALID_ARGUMENT,
                    f"file_id: {user} reads this file and has not ended; cancel it first, or wait",
                    field="file_id",
                )
            own = (*self._alive(tenant), FILES.c.id == id_[:MAX_ID])
            gone = connection.execute(update(FILES).where(*own).values(expires_unix_ms=_LONG_AGO))
            if not gone.rowcount:
                raise not_found("file", id_)

    def forget(self, tenant: str, id_: str, drop: Callable[[str], None]) -> None:
        """Has `drop` remove the content of a file that nobody sees any more, and then forgets the file: where
        that is not possible now, it is known later, too.
        """
        drop(id_)
        with self._writing() as connection:
            own = (FILES.c.tenant == tenant, FILES.c.id == id_)
            connection.execute(delete(FILES).where(*own, FILES.c.expires_unix_ms <= self.now_ms()))

    def _alive(self, tenant: str) -> tuple[Any, ...]:
        lasts = (FILES.c.expires_unix_ms == 0) | (FILES.c.expires_unix_ms > self.now_ms())
        return FILES.c.tenant == tenant, lasts

    def _page(
        self, table: Any, query: Any, tenant: str, *, limit: int, order: str, after: str
    ) -> tuple[Sequence[Row[Any]], bool]:
        moment = table.c.created_unix_ms
        with self.engine.connect() as connection:
            if after:
                start = connection.scalar(
                    select(moment).where(table.c.tenant == tenant, table.c.id == after[:MAX_ID])
                )
                if start is None:
                    raise not_found("file" if table is FILES else "batch", after, "after")
                later = (moment > start) | ((moment == start) & (table.c.id > after))
                earlier = (moment < start) | ((moment == start) & (table.c.id < after))
                query = query.where(later if order == "asc" else earlier)
            keys = (moment, table.c.id) if order == "asc" else (moment.desc(), table.c.id.desc())
            rows = connection.execute(query.order_by(*keys).limit(limit + 1)).all()
        return rows[:limit], len(rows) > limit

    # Batches.

    def create(self, tenant: str, batch: RequestBatch) -> None:
        """Adds a batch, which waits for whoever runs it; raises STORE_FULL."""
        with self._writing() as connection:
            num_open = connection.scalar(
                select(func.count())
                .select_from(BATCHES)
                .where(BATCHES.c.tenant == tenant, BATCHES.c.is_open == 1)
            )
            if (num_open or 0) >= self.config.max_batches:
                limit = self.config.max_batches
                problem = f"{num_open} of your batches have not ended; the limit is {limit}"
                raise _full(problem, "max_batches", "wait until one has ended, or cancel one")
            connection.execute(
                insert(BATCHES).values(
                    tenant=tenant,
                    id=batch.id,
                    api=batch.api,
                    input_file_id=batch.input_file_id,
                    is_open=1,
                    created_unix_ms=self.now_ms(),
                    cancelled_unix_s=0,
                    owner="",
                    lease_until_unix_ms=0,
                    body=self._encoded(tenant, batch),
                )
            )

    def get(self, tenant: str, api: str, id_: str) -> RequestBatch:
        """Raises STORED_NOT_FOUND."""
        with self.engine.connect() as connection:
            return self._shown(self._row(connection, tenant, api, id_))

    def _row(self, connection: Connection, tenant: str, api: str, id_: str) -> Row[Any]:
        own = (BATCHES.c.tenant == tenant, BATCHES.c.api == api, BATCHES.c.id == id_[:MAX_ID])
        row = connection.execute(select(BATCHES).where(*own)).one_or_none()
        if row is None:
            raise not_found("batch", id_)
        return row

    def page(
        self, tenant: str, api: str, *, limit: int, order: str = "desc", after: str = ""
    ) -> tuple[list[RequestBatch], bool]:
        """Batches behind the one named `after`, and whether there are more; raises STORED_NOT_FOUND."""
        query = select(BATCHES).where(BATCHES.c.tenant == tenant, BATCHES.c.api == api)
        rows, more = self._page(BATCHES, query, tenant, limit=limit, order=order, after=after)
        return [self._shown(row) for row in rows], more

    def cancel(self, tenant: str, api: str, id_: str) -> RequestBatch:
        """Asks for its end, whoever runs it; one that has ended stays as it is. Raises STORED_NOT_FOUND."""
        with self._writing() as connection:
            row = self._row(connection, tenant, api, id_)
            if row.is_open and not row.cancelled_unix_s:
                own = (BATCHES.c.tenant == tenant, BATCHES.c.id == row.id)
                now_s = self.now_ms() // 1000
                connection.execute(update(BATCHES).where(*own).values(cancelled_unix_s=now_s))
                row = self._row(connection, tenant, api, id_)
        return self._shown(row)

    def delete_batch(self, tenant: str, api: str, id_: str) -> RequestBatch:
        """Forgets a batch that has ended; raises STORED_NOT_FOUND, and INVALID_ARGUMENT for an open one."""
        with self._writing() as connection:
            row = self._row(connection, tenant, api, id_)
            if row.is_open:
                message = f"batch_id: {row.id} has not ended; cancel it first, or wait"
                raise MillraceError(Reason.INVALID_ARGUMENT, message, field="batch_id")
            connection.execute(delete(BATCHES).where(BATCHES.c.tenant == tenant, BATCHES.c.id == row.id))
        return self._shown(row)

    def _shown(self, row: Row[Any]) -> RequestBatch:
        """As it is shown: its end may have been asked for since it was written."""
        batch = self._decoded(row)
        if row.cancelled_unix_s and batch.is_open:
            batch.cancelling_unix_s = row.cancelled_unix_s
            if batch.status in _RUNNING:
                batch.status = BatchStatus.CANCELLING
        return batch

    # Leases.

    def take(self, limit: int, besides: Collection[str] = ()) -> list[BatchLease]:
        """Takes leases on batches that nobody runs, the oldest first. The caller runs those `besides`, though
        it may have been unable to renew their leases.
        """
        columns, now = BATCHES.c, self.now_ms()
        waiting = select(BATCHES).where(
            columns.is_open == 1, columns.lease_until_unix_ms < now, columns.id.not_in(besides)
        )
        with self.engine.connect() as connection:
            rows = connection.execute(waiting.order_by(columns.created_unix_ms).limit(limit)).all()
        taken = []
        for row in rows:
            owner = secrets.token_hex(8)
            mine = update(BATCHES).where(
                columns.tenant == row.tenant,
                columns.id == row.id,
                columns.owner == row.owner,
                columns.lease_until_unix_ms == row.lease_until_unix_ms,
            )
            values = {"owner": owner, "lease_until_unix_ms": self._until()}
            with self._writing() as connection:
                if connection.execute(mine.values(values)).rowcount:
                    try:
                        batch = self._decoded(row)
                    except SealBroken as error:
                        # Others run meanwhile; this one is tried again when its lease has run out.
                        _log.error("batch %s cannot be run: %s", row.id, error)
                        continue
                    taken.append(BatchLease(row.tenant, batch, owner, row.cancelled_unix_s))
        return taken

    def save(self, lease: BatchLease) -> None:
        """Writes the batch as it stands, and renews the lease; learns whether its end was asked for. Raises
        BatchLeaseLost.
        """
        batch, columns = lease.batch, BATCHES.c
        own = (columns.tenant == lease.tenant, columns.id == batch.id)
        with self._writing() as connection:
            renewed = update(BATCHES).where(*own, columns.owner == lease.owner)
            values = {
                "body": self._encoded(lease.tenant, batch),
                "is_open": int(batch.is_open),
                "lease_until_unix_ms": self._until(),
            }
            if not connection.execute(renewed.values(values)).rowcount:
                raise BatchLeaseLost
            lease.cancelled_unix_s = connection.scalar(select(columns.cancelled_unix_s).where(*own)) or 0

    def release(self, lease: BatchLease) -> None:
        """Leaves it to another gateway at once."""
        columns = BATCHES.c
        own = (columns.tenant == lease.tenant, columns.id == lease.batch.id, columns.owner == lease.owner)
        with self._writing() as connection:
            left = {"owner": "", "lease_until_unix_ms": 0}
            connection.execute(update(BATCHES).where(*own).values(left))

    def _until(self) -> int:
        return self.now_ms() + round(self.config.lease_s * 1000)

    # What has expired.

    def sweep(self, limit: int, drop: Callable[[str], None]) -> int:
        """Forgets some of what has expired, files when `drop` has removed their content; how much it was."""
        now, in_use = self.now_ms(), select(BATCHES.c.input_file_id).where(BATCHES.c.is_open == 1)
        due = select(FILES.c.tenant, FILES.c.id).where(
            FILES.c.expires_unix_ms > 0, FILES.c.expires_unix_ms <= now, FILES.c.id.not_in(in_use)
        )
        old = now - round(self.config.retention_days * 86_400_000)
        ended = select(BATCHES.c.tenant, BATCHES.c.id).where(
            BATCHES.c.is_open == 0, BATCHES.c.created_unix_ms <= old
        )
        with self.engine.connect() as connection:
            files = connection.execute(due.limit(limit)).all()
            batches = connection.execute(ended.limit(limit)).all()
        for tenant, id_ in files:
            self.forget(tenant, id_, drop)
        with self._writing() as connection:
            for tenant, id_ in batches:
                own = (BATCHES.c.tenant == tenant, BATCHES.c.id == id_)
                connection.execute(delete(BATCHES).where(*own))
        return len(files) + len(batches)

    # What operators are told.

    def waiting_since_ms(self) -> int:
        """When the oldest batch was created that nobody runs; 0 where there is none."""
        columns = BATCHES.c
        oldest = select(func.min(columns.created_unix_ms)).where(
            columns.is_open == 1, columns.lease_until_unix_ms < self.now_ms()
        )
        with self.engine.connect() as connection:
            return int(connection.scalar(oldest) or 0)

    def used_bytes(self) -> int:
        """Bytes of all files of all tenants, as their clients see them."""
        with self.engine.connect() as connection:
            return int(connection.scalar(select(func.coalesce(func.sum(FILES.c.num_bytes), 0))) or 0)


def _full(problem: str, key: str, remedy: str = "delete files that you need no more") -> MillraceError:
    return MillraceError(
        Reason.STORE_FULL,
        f"{problem} (gateway.batches.{key}); {remedy}",
        metadata={"limit": key},
    )


def _file(row: Row[Any]) -> StoredFile:
    return StoredFile(**{name: getattr(row, name) for name in StoredFile.__struct_fields__})


def _place(tenant: str, id_: str) -> str:
    return f"batch/{tenant}/{id_}"
