"""The store as faces see it: what may be kept, calls that wait for the database in threads, and sweeping."""

from __future__ import annotations

import asyncio
from typing import Any

from sqlalchemy import Select, delete, select

from contract.errors import MillraceError, unsupported
from gateway.config import StoreConfig
from gateway.settings import ANY_TENANT
from gateway.store.background import BackgroundStore
from gateway.store.conversations import ConversationStore
from gateway.store.database import StoreDatabase
from gateway.store.responses import ResponseStore
from gateway.store.seal import RowSeal
from gateway.store.tables import CONVERSATIONS, RESPONSES, USED, open_store
from gateway.store.threads import WaitingThreads

# Calls that wait for the database at a time; others wait for one of them.
_THREADS = 4
# What is removed in one transaction, so that others need not wait for long.
_SWEPT_TOGETHER = 100


class Store:
    """Stored state of one deployment, in one gateway process; made by `open`."""

    def __init__(self, config: StoreConfig, database: StoreDatabase) -> None:
        self.config = config
        self._database = database
        self._threads = WaitingThreads(
            "store",
            _THREADS,
            database="the database of stored responses",
            remedy="try again, or send store false",
        )
        self.call = self._threads.call
        self.responses = ResponseStore(database)
        self.conversations = ConversationStore(database)
        self.background = BackgroundStore(database, self.responses, config.lease_s)
        self.find_items, self.check_room = database.find_items, database.check_room
        self._sweeping: asyncio.Task[None] | None = None

    @classmethod
    def open(cls, config: StoreConfig) -> Store | None:
        """The store that is configured, None where nobody's state is kept. Raises ConfigError."""
        if not config.tenants:
            return None
        database = StoreDatabase(
            open_store(config.url),
            RowSeal(config.secrets()),
            retention_s=config.retention_days * 86400,
            max_bytes=config.max_bytes,
        )
        return cls(config, database)

    def keeps(self, tenant: str) -> bool:
        """Whether a tenant's state is kept."""
        return ANY_TENANT in self.config.tenants or tenant in self.config.tenants

    def start(self) -> None:
        """Begins to remove what has expired."""
        self._sweeping = asyncio.create_task(self._keep_sweeping(), name="sweep store")

    async def close(self) -> None:
        """Ends what runs, and releases connections."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait({self._sweeping})
        await self._threads.close()
        self.dispose()

    def dispose(self) -> None:
        """Releases connections to the database."""
        self._database.engine.dispose()

    async def _keep_sweeping(self) -> None:
        while True:
            try:
                while await self.call(self.sweep):
                    pass
            except MillraceError:
                # It is in the log; what has expired is not shown meanwhile.
                pass
            await asyncio.sleep(self.config.sweep_interval_s)

    def sweep(self) -> int:
        """Removes some of what has expired, and what a log still has of it; how much it was."""
        database, num_removed = self._database, 0
        for table, drop in (
            (RESPONSES, database.drop_response),
            (CONVERSATIONS, database.drop_conversation),
        ):
            old = table.c.expires_unix_ms <= database.now_ms()
            some = select(table.c.tenant, table.c.id).where(old).limit(_SWEPT_TOGETHER)
            for tenant in self._tenants(some):
                with database.writing(tenant) as connection:
                    # It may have been used since.
                    for _, id_ in connection.execute(some.where(table.c.tenant == tenant)).all():
                        num_removed += drop(connection, tenant, id_)
        empty = USED.c.num_bytes <= 0
        for tenant in self._tenants(select(USED.c.tenant).where(empty)):
            with database.writing(tenant) as connection:
                connection.execute(delete(USED).where(USED.c.tenant == tenant, empty))
        self._truncate_log()
        return num_removed

    def _tenants(self, query: Select[Any]) -> list[str]:
        """Those in the first column, each once."""
        with self._database.engine.connect() as connection:
            return list(dict.fromkeys(connection.execute(query).scalars()))

    def _truncate_log(self) -> None:
        """SQLite's write-ahead log has the pages before a deletion until it is written anew."""
        if self._database.engine.dialect.name == "sqlite":
            with self._database.engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")


def storing(store: Store | None, tenant: str, *, asked: bool | None, background: bool) -> Store | None:
    """Where a response is kept, None where it is not. Raises UNSUPPORTED_FIELD for one in the background that
    cannot be kept.
    """
    if store is not None and store.keeps(tenant):
        if background and asked is False:
            raise unsupported(
                "store", "a background response is kept while it is computed; send store true", "it is false"
            )
        return None if asked is False else store
    if background:
        remedy = "stream the answer, or have the operator add your tenant to gateway.store.tenants"
        raise unsupported("background", remedy, "this deployment keeps no responses of your tenant")
    return None
