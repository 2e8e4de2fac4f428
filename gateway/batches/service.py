"""Files and batches as faces see them, and their life in one gateway process."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from contract.errors import MillraceError, Reason, invalid
from gateway.batches.calls import LineAnswer, answered, caller_of
from gateway.batches.content import ContentStorage, DirectoryStorage, Upload, disk_full
from gateway.batches.job import JobParts
from gateway.batches.objects import BucketStorage
from gateway.batches.runner import BatchRunner, surroundings_of
from gateway.batches.sealed import ContentKeys, needed, opened
from gateway.batches.store import BatchLease, BatchStore, StoredFile, not_found
from gateway.batches.tables import MAX_FILENAME, open_tables
from gateway.batches.types import RequestBatch, ResultForm
from gateway.batches.window import LineWindow
from gateway.config import BatchesConfig
from gateway.http.exchange import Exchange, Handler
from gateway.pipeline.pipeline import Pipeline
from gateway.store.threads import WaitingThreads
from gateway.types.error_form import ErrorForms
from gateway.types.request import Identity
from observability.emit import names
from observability.emit.metrics import Metrics
from runtime.errors import ConfigError

_log = logging.getLogger(__name__)
_THREADS = 8
# Uploads to, and downloads from, where files are stored, at a time; what runs must not wait for them.
_TRANSFERS = 4
# What is removed in one transaction.
_SWEPT_TOGETHER = 100
# Uploads that nobody completes are deleted after so long.
_ABANDONED_S = 24 * 3600.0
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([mhd])", re.ASCII)
_UNITS = {"m": 60, "h": 3600, "d": 86_400}
_MIN_WINDOW_S, _MAX_WINDOW_S = 60, 30 * 86_400
# Seconds for which a client may have its files kept.
MIN_KEPT_S, MAX_KEPT_S = 3600, 30 * 86_400


class Batches:
    """Files and batches of one deployment, in one gateway process; made by `open`."""

    def __init__(
        self,
        config: BatchesConfig,
        store: BatchStore,
        storage: ContentStorage,
        keys: ContentKeys | None,
        pipeline: Callable[[], Pipeline],
        *,
        max_line_bytes: int,
        error_forms: ErrorForms,
        forms: Mapping[str, ResultForm],
        metrics: Metrics,
    ) -> None:
        self.config = config
        self.store = store
        self.folder = Path(config.directory)
        self._storage, self._keys = storage, keys
        self._uploads, self._work = self.folder / "uploads", self.folder / "work"
        self._pipeline = pipeline
        self._metrics = metrics
        self._error_forms = error_forms
        what = "the database of files and batches"
        self._threads = WaitingThreads("batches", _THREADS, database=what)
        self._transfers = WaitingThreads("files", _TRANSFERS, database=what)
        self.call = self._threads.call
        # Handlers by the paths that lines may name.
        self.endpoints: Mapping[str, Handler] = {}
        self._sweeping: asyncio.Task[None] | None = None
        parts = JobParts(
            store=store,
            storage=storage,
            keys=keys,
            folder=self._work,
            config=config,
            max_line_bytes=max_line_bytes,
            forms=dict(forms),
            metrics=metrics,
            call=self.call,
            transfer=self._transfers.call,
            ask=self._ask,
            usual_rate=self._usual_rate,
            wake=self._wake,
        )
        self._runner = BatchRunner(
            parts,
            LineWindow(config.max_in_flight),
            self._weight,
            lambda: surroundings_of(pipeline()),
        )

    @classmethod
    def open(
        cls,
        config: BatchesConfig,
        pipeline: Callable[[], Pipeline],
        *,
        max_line_bytes: int,
        error_forms: ErrorForms,
        forms: Mapping[str, ResultForm],
        metrics: Metrics,
    ) -> Batches | None:
        """Files and batches as they are configured, None where they are not. Raises ConfigError."""
        if not config.directory:
            return None
        folder, secrets_ = Path(config.directory), config.secrets()
        keys = ContentKeys(secrets_) if secrets_ else None
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            tables = open_tables(config.url or f"sqlite:///{folder / 'batches.sqlite'}")
            store = BatchStore(tables, config, None if keys is None else keys.of_rows())
            storage = BucketStorage(config.s3) if config.s3.bucket else DirectoryStorage(folder / "files")
            return cls(
                config,
                store,
                storage,
                keys,
                pipeline,
                max_line_bytes=max_line_bytes,
                error_forms=error_forms,
                forms=forms,
                metrics=metrics,
            )
        except OSError as error:
            raise ConfigError(f"gateway.batches.directory: {error}") from error

    def start(self) -> None:
        """Begins to run batches, and to remove what has expired."""
        self._runner.start()
        self._sweeping = asyncio.create_task(self._keep_sweeping(), name="sweep files")

    async def close(self) -> None:
        """Leaves batches to other gateways, and releases connections."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait({self._sweeping})
        await self._runner.close()
        await self._transfers.close()
        await self._threads.close()
        self.store.engine.dispose()

    def _usual_rate(self) -> float:
        return self._runner.usual_rate()

    def _wake(self) -> None:
        self._runner.wake()

    def _weight(self, tenant: str) -> float:
        return self._pipeline().tiers.tenant_weight(tenant)

    async def _ask(self, lease: BatchLease, line: int, body: bytes) -> LineAnswer:
        batch, pipeline = lease.batch, self._pipeline()
        form = self._error_forms.of(batch.endpoint)
        caller = caller_of(pipeline.callers, batch.identity, batch.id, line)
        handler = self.endpoints[batch.endpoint]
        return await answered(handler, batch.endpoint, body, caller, form, pipeline.intake)

    # Files.

    def begin_upload(self) -> Upload:
        """A file that comes piece by piece; for a thread."""
        return Upload(self._uploads, self._keys)

    async def write(self, upload: Upload, piece: bytes) -> None:
        """Appends a piece; raises STORE_UNAVAILABLE where the disk is full."""
        try:
            await self.call(upload.write, piece)
        except OSError as error:
            raise disk_full(error, self._uploads) from error

    async def keep(
        self, tenant: str, upload: Upload, *, purpose: str, filename: str, kept_s: int
    ) -> StoredFile:
        """Makes an upload that is whole a file; `kept_s` of 0 keeps it as long as any. Raises STORE_FULL, and
        STORE_UNAVAILABLE where the disk is full.
        """
        now_ms = self.store.now_ms()
        kept_ms = kept_s * 1000 or round(self.config.retention_days * 86_400_000)
        file = StoredFile(
            id=upload.id,
            purpose=purpose,
            filename=filename[:MAX_FILENAME],
            num_bytes=upload.num_bytes,
            is_sealed=upload.is_sealed,
            created_unix_ms=now_ms,
            expires_unix_ms=now_ms + kept_ms,
        )
        try:
            await self._transfers.call(self._keep, tenant, upload, file)
        except OSError as error:
            raise disk_full(error, self._uploads) from error
        return file

    def _keep(self, tenant: str, upload: Upload, file: StoredFile) -> None:
        self.store.check_room(tenant, file.num_bytes)
        upload.complete()
        self._storage.publish(file.id, upload.path, lambda: None)
        try:
            self.store.add_file(tenant, file)
        except BaseException:
            self._storage.delete(file.id)
            raise

    async def delete_file(self, tenant: str, id_: str) -> None:
        """Removes a file; raises as `BatchStore.delete_file`. What cannot be removed now is swept later."""
        await self.call(self.store.delete_file, tenant, id_)
        try:
            await self._transfers.call(self.store.forget, tenant, id_, self._storage.delete)
        except (MillraceError, OSError) as error:
            _log.warning("the content of %s is removed later: %s", id_, error)

    async def content(self, file: StoredFile) -> AsyncGenerator[bytes, None]:
        """The bytes of a file; raises STORED_NOT_FOUND before the first where they are gone."""
        try:
            pieces = await self._transfers.call(self._pieces, file)
        except FileNotFoundError as error:
            raise not_found("file", file.id) from error
        while piece := await self._transfers.call(next, pieces, b""):
            yield piece

    def _pieces(self, file: StoredFile) -> Iterator[bytes]:
        pieces = self._storage.pieces(file.id)
        return opened(pieces, needed(self._keys).of(file.id)) if file.is_sealed else pieces

    async def send(self, exchange: Exchange, file: StoredFile, content_type: str) -> None:
        """Answers with the bytes of a file, as fast as the client reads; raises STORED_NOT_FOUND."""
        pieces = self.content(file)
        exchange.watch_client(lambda: None)
        try:
            async for piece in pieces:
                if not exchange.begun:
                    await exchange.begin_content(content_type, file.num_bytes)
                await exchange.write(piece)
                if exchange.client_gone:
                    return
            if not exchange.begun:
                await exchange.begin_content(content_type, 0)
            await exchange.end_events(b"")
        finally:
            exchange.unwatch()
            await pieces.aclose()

    # Batches.

    async def create(self, identity: Identity, batch: RequestBatch) -> RequestBatch:
        """Takes a batch, which begins when somebody runs it; raises STORE_FULL."""
        await self.call(self.store.create, identity.tenant, batch)
        return batch

    def new(
        self,
        identity: Identity,
        *,
        api: str,
        endpoint: str,
        file: StoredFile,
        window: str,
        metadata: dict[str, str],
    ) -> RequestBatch:
        """A batch of a caller's; raises INVALID_ARGUMENT for an endpoint or a window that cannot be meant."""
        if endpoint not in self.endpoints:
            raise invalid("endpoint", f"{endpoint[:80]!r} is not one of {', '.join(self.endpoints)}")
        now_s = self.store.now_ms() // 1000
        tier = self._pipeline().tiers.left_over.name
        return RequestBatch(
            id=f"batch_{secrets.token_hex(16)}",
            api=api,
            endpoint=endpoint,
            input_file_id=file.id,
            is_input_sealed=file.is_sealed,
            is_sealed=self._keys is not None,
            identity=replace(identity, tier=tier, in_batch=True, deadline_unix_ms=None),
            completion_window=window,
            metadata=metadata,
            created_unix_s=now_s,
            deadline_unix_s=now_s + window_s(window),
        )

    async def get(self, tenant: str, api: str, id_: str) -> RequestBatch:
        """Raises STORED_NOT_FOUND."""
        batch = await self.call(self.store.get, tenant, api, id_)
        return self._told(tenant, batch)

    async def page(
        self, tenant: str, api: str, *, limit: int, order: str = "desc", after: str = ""
    ) -> tuple[list[RequestBatch], bool]:
        """See BatchStore.page."""
        batches, more = await self.call(self.store.page, tenant, api, limit=limit, order=order, after=after)
        return [self._told(tenant, each) for each in batches], more

    def _told(self, tenant: str, batch: RequestBatch) -> RequestBatch:
        """The batch as its row has it, since every gateway tells the same and its counts never go back. What
        holds it up is told by whoever runs it, because a database that is full cannot be told.
        """
        detail = self._runner.detail(tenant, batch.id) if batch.is_open else None
        return batch if detail is None else replace(batch, detail=detail)

    async def cancel(self, tenant: str, api: str, id_: str) -> RequestBatch:
        """Asks for its end; raises STORED_NOT_FOUND."""
        batch = await self.call(self.store.cancel, tenant, api, id_)
        self._runner.cancel(tenant, batch)
        return self._told(tenant, batch)

    async def delete_batch(self, tenant: str, api: str, id_: str) -> None:
        """Removes a batch that has ended, and its results; raises STORED_NOT_FOUND, and INVALID_ARGUMENT for
        an open one.
        """
        batch = await self.call(self.store.delete_batch, tenant, api, id_)
        for file in filter(None, (batch.input_file_id, batch.output_file_id, batch.error_file_id)):
            try:
                await self.delete_file(tenant, file)
            except MillraceError as error:
                if error.reason is not Reason.STORED_NOT_FOUND:
                    raise

    # What has expired.

    async def _keep_sweeping(self) -> None:
        while True:
            try:
                while await self._transfers.call(self.sweep):
                    pass
                used = await self.call(self.store.used_bytes)
                self._metrics.set(names.BATCH_FILE_BYTES, used)
            except (MillraceError, OSError) as error:
                _log.error("files that have expired cannot be removed, will retry: %s", error)
            await asyncio.sleep(self.config.sweep_interval_s)

    def sweep(self) -> int:
        """Removes some of what has expired, and uploads that nobody completes; how much it was."""
        num_removed = self.store.sweep(_SWEPT_TOGETHER, self._storage.delete)
        old_s = time.time() - _ABANDONED_S
        if self._uploads.is_dir():
            for path in self._uploads.iterdir():
                if path.stat().st_ctime < old_s:
                    path.unlink(missing_ok=True)
        return num_removed


def window_s(window: str) -> int:
    """Seconds of a completion window such as "24h"; raises INVALID_ARGUMENT."""
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not _MIN_WINDOW_S <= seconds <= _MAX_WINDOW_S:
        problem = f"{window[:20]!r} is no time from 1m to 30d; say it in minutes, hours or days, such as 24h"
        raise invalid("completion_window", problem)
    return seconds
