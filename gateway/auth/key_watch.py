"""Keeps a gateway's keys as fresh as promised, without asking the database for any request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from gateway.auth.directory import KeyDirectory
from gateway.auth.key_store import KeyStore

_log = logging.getLogger(__name__)


class KeyWatch:
    """Looks at the store's revision at every interval and reloads the directory when it has changed.

    A change is in force after at most one interval and one read. Keys of a store that cannot be read are
    believed for `max_staleness_s` and then dropped: a revoked key must not live on because nobody can ask.
    """

    def __init__(
        self,
        store: KeyStore,
        directory: KeyDirectory,
        *,
        interval_s: float,
        max_staleness_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._directory = directory
        self._interval_s = interval_s
        self._max_staleness_s = max_staleness_s
        self._clock = clock
        self._revision = -1
        self._read_s = clock()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Reads the keys once, then watches."""
        await self.refresh()
        self._task = asyncio.create_task(self._watch(), name="key-watch")

    async def close(self) -> None:
        """Stops watching and closes the store."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await asyncio.to_thread(self._store.close)

    async def refresh(self) -> None:
        """Reloads if there was a change."""
        try:
            revision = await asyncio.to_thread(self._store.revision)
            if revision != self._revision:
                self._directory.replace_stored(await asyncio.to_thread(self._store.entries))
                self._revision = revision
                _log.info("API keys loaded, revision %d", revision)
            self._read_s = self._clock()
        except SQLAlchemyError as error:
            _log.error("the key store cannot be read: %s", error)
            if self._revision >= 0 and self._clock() - self._read_s > self._max_staleness_s:
                self._directory.replace_stored(())
                self._revision = -1
                _log.error("keys of the store are dropped: not read for %.0f s", self._max_staleness_s)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.refresh()
