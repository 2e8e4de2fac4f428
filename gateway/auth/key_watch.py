"""Keeps a gateway's keys as fresh as promised, without asking the database for any request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy.exc import SQLAlchemyError

from gateway.auth.directory import KeyDirectory
from gateway.auth.key_store import KeyStore
from gateway.config import KeyEntry

_log = logging.getLogger(__name__)

# How long a read may take before it is said that the store does not answer.
_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class _Reading:
    """What the store said, and since when that may have been old."""

    began_s: float
    revision: int
    # None: the revision is the one that is known.
    entries: list[KeyEntry] | None


class KeyWatch:
    """Looks at the store's revision at every interval and reloads the directory when it has changed.

    A change is in force after at most one interval and one read. Keys of a store that cannot be read are
    believed for `max_staleness_s` and then dropped: a revoked key must not live on because nobody can ask.
    A database that neither answers nor refuses is one that cannot be read.
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
        # A read that has not come back yet: one at a time, however long it takes.
        self._reading: asyncio.Future[_Reading] | None = None
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
        """Reloads if there was a change. Returns though the store is silent, before its keys are too old."""
        reading = self._reading or self._begin()
        self._reading = reading
        believed_s = self._read_s + self._max_staleness_s - self._clock()
        await asyncio.wait([reading], timeout=max(self._interval_s, min(believed_s, _ANSWER_S)))
        if not reading.done():
            self._note_unread("it does not answer")
            return
        self._reading = None
        try:
            self._apply(reading.result())
        except SQLAlchemyError as error:
            self._note_unread(str(error))

    def _apply(self, read: _Reading) -> None:
        if read.entries is not None:
            self._directory.replace_stored(read.entries)
            self._revision = read.revision
            _log.info("API keys loaded, revision %d", read.revision)
        if read.revision == self._revision:
            # Otherwise the keys were dropped while it was under way: the next look reads them.
            self._read_s = read.began_s

    def _note_unread(self, why: str) -> None:
        _log.error("the key store cannot be read: %s", why)
        if self._revision >= 0 and self._clock() - self._read_s > self._max_staleness_s:
            self._directory.replace_stored(())
            self._revision = -1
            _log.error("keys of the store are dropped: not read for %.0f s", self._max_staleness_s)

    def _begin(self) -> asyncio.Future[_Reading]:
        """A read on a thread that nobody has to wait for: the process can end while a database is silent."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Reading] = loop.create_future()
        known = self._revision

        def report(read: _Reading | Exception) -> None:
            if isinstance(read, Exception):
                future.set_exception(read)
            else:
                future.set_result(read)

        def run() -> None:
            read: _Reading | Exception
            try:
                read = self._read(known)
            except Exception as error:
                read = error
            with contextlib.suppress(RuntimeError):
                # The loop may have ended meanwhile.
                loop.call_soon_threadsafe(report, read)

        threading.Thread(target=run, name="key-watch", daemon=True).start()
        return future

    def _read(self, known: int) -> _Reading:
        began_s = self._clock()
        revision = self._store.revision()
        return _Reading(began_s, revision, None if revision == known else self._store.entries())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.refresh()
