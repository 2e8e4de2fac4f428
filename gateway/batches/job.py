"""One batch that this gateway runs, from its input or wherever another gateway left it to its results.

Its runner says when a line may begin (`wants`, `take`, `answer`); everything else the batch does itself: it
reads its input into an index, writes results down, keeps its lease, and ends.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from contract.errors import MillraceError, Reason
from gateway.batches.calls import LineAnswer, cancelled_error, expired_error, tokens_of
from gateway.batches.content import FULL, ContentStorage, check_room, free_bytes, make_private, write_file
from gateway.batches.lines import (
    BadInput,
    Fault,
    LineEntry,
    LineIndex,
    index_lines,
    name_of,
    read_line,
    request_of,
)
from gateway.batches.sealed import ContentKeys, SealingPieces, needed, open_sealed
from gateway.batches.spool import NAMES, Spool, SpoolBusy, Written
from gateway.batches.store import BatchLease, BatchLeaseLost, BatchStore, StoredFile
from gateway.batches.types import BatchStatus, LineOutcome, LineResult, Problem, ResultForm
from gateway.batches.wording import expiry, out_of_reach, without_room
from gateway.config import BatchesConfig
from gateway.http.errors import unexpected
from observability.emit import names
from observability.emit.metrics import Metrics

_log = logging.getLogger(__name__)
# How often results are written down (a killed gateway's lines since then are computed again), and how often
# in the time of a lease there is a sign of life.
_FLUSH_S, _BEATS = 0.1, 4
# Then what passes is tried again; a line that was refused for load at most so late.
_RETRY_S, _MAX_RETRY_S = 1.0, 30.0
# Tries of a line that fails for no fault of its own, and not for load.
_MAX_TRIES = 3
_AT_FAULT = frozenset({Reason.ENGINE_LOST, Reason.INTERNAL, Reason.STEP_FAILED})
# Gateways that may be lost one after another under a batch of which meanwhile no line was answered.
_MAX_TAKES = 8
# Lines that end until one more is tried than had streams lately.
_TRIED_AFTER = 16
# Lines after which a batch's own rate says when it will be through; and those whose results are written at a
# time where nothing is computed for them.
_ENOUGH_LINES, _TOGETHER = 20, 256


@dataclass(frozen=True, kw_only=True)
class JobParts:
    """What batches have in common."""

    store: BatchStore
    storage: ContentStorage
    metrics: Metrics
    # None where what is written now is not encrypted.
    keys: ContentKeys | None
    # Where they keep what they need until they end: a folder for each, below it.
    folder: Path
    config: BatchesConfig
    max_line_bytes: int
    forms: dict[str, ResultForm]
    # Have a thread call what waits for disks and databases, and what waits for where files are stored.
    call: Callable[..., Awaitable[Any]]
    transfer: Callable[..., Awaitable[Any]]
    # Answers the body of a line of a batch.
    ask: Callable[[BatchLease, int, bytes], Awaitable[LineAnswer]]
    # Lines a second that a batch may expect before it has measured; 0 where nobody has.
    usual_rate: Callable[[], float]
    # Something changed that a runner may have waited for.
    wake: Callable[[], None]


class _NeverRead(Exception):
    """Its end came before its input could be read."""


class _Stopped(Exception):
    """The gateway leaves it to others."""


class BatchJob:
    """See above. `run` is its life; it ends when the batch does, or belongs to somebody else."""

    def __init__(self, lease: BatchLease, parts: JobParts) -> None:
        self.lease = lease
        self.tenant = lease.tenant
        self._parts = parts
        self._form = parts.forms[lease.batch.api]
        self._folder = parts.folder / lease.batch.id
        self._source = Path()
        self._spool: Spool | None = None
        self._index: LineIndex | None = None
        # Every line was taken once.
        self._is_through = False
        # Lines to be tried again, and tries of those that failed.
        self._again: deque[LineEntry] = deque()
        self._tries: dict[int, int] = {}
        # Lines that were taken and have not come to their end, and how many the tenant's streams were enough
        # for lately; of those that have begun, the tasks.
        self._num_taken, self._most_taken = 0, math.inf
        self._under_way: set[asyncio.Task[Any]] = set()
        self._results: list[Written] = []
        # Monotonic moments: no line begins before the first; the last sign of life; its own beginning.
        self._not_before_s = 0.0
        self._saved_s = time.monotonic()
        self._began_s, self._began_at = time.monotonic(), 0
        # Why no line begins; "" where lines do.
        self._pause = ""
        self._stopping = self.is_lost = False

    # For the runner.

    @property
    def state(self) -> str:
        """Its status, or that it is cancelled or paused, as operators are told it."""
        if self._pause:
            return "paused"
        return BatchStatus.CANCELLING if self.lease.cancelled_unix_s else self.lease.batch.status

    def wants(self, now_s: float) -> bool:
        """Whether a line of it may begin."""
        if self._index is None or self._pause or self._stopping or now_s < self._not_before_s:
            return False
        has_streams = self._num_taken + 1 <= self._most_taken
        return has_streams and not self._is_ending and not (self._is_through and not self._again)

    def take(self) -> LineEntry | None:
        """The next line; None where there is none after all."""
        if self._again:
            entry: LineEntry | None = self._again.popleft()
        else:
            entry = None if self._index is None else self._index.next()
            self._is_through = entry is None
        self._num_taken += entry is not None
        return entry

    async def answer(self, entry: LineEntry) -> float | None:
        """Has a line answered; the tokens it took, None where it will be tried again."""
        task = asyncio.current_task()
        assert task is not None, "a line is a task"
        self._under_way.add(task)
        try:
            return await self._answer(entry)
        except asyncio.CancelledError:
            # Its time is up, or the batch is left to others.
            return None
        except Exception:
            _log.exception("line %d of batch %s failed", entry.line, self.lease.batch.id)
            error = unexpected()
            if not self._is_tried_again(entry, error):
                failed = LineResult(custom_id=None, line=entry.line, outcome=LineOutcome.ERRORED, error=error)
                self._put(entry, failed)
            return None
        finally:
            self._under_way.discard(task)
            self._num_taken -= 1

    def stop(self) -> None:
        """Lets no further line begin, ends those under way, and leaves the batch to others."""
        self._stopping = True
        self._end_lines()

    # Lines.

    async def _answer(self, entry: LineEntry) -> float | None:
        parts, batch = self._parts, self.lease.batch
        data = b"" if entry.fault is Fault.TOO_LONG else await parts.call(self._read, entry)
        try:
            line = request_of(data, entry, batch.endpoint, parts.max_line_bytes)
        except MillraceError as error:
            named = name_of(data)
            failed = LineResult(custom_id=named, line=entry.line, outcome=LineOutcome.ERRORED, error=error)
            self._put(entry, failed)
            return 0.0
        answer = await parts.ask(self.lease, entry.line, bytes(line.body))
        if answer.error is not None and self._is_tried_again(entry, answer.error):
            return None
        self._put(
            entry,
            LineResult(
                custom_id=line.custom_id,
                line=entry.line,
                outcome=LineOutcome.SUCCEEDED if answer.status < 400 else LineOutcome.ERRORED,
                request_id=answer.request_id,
                status=answer.status,
                body=answer.body,
            ),
        )
        return tokens_of(answer.body)

    def _put(self, entry: LineEntry, result: LineResult) -> None:
        self._tries.pop(entry.position, None)
        self._most_taken += 1 / _TRIED_AFTER
        self._results.append(self._written(entry, result))

    def _written(self, entry: LineEntry, result: LineResult) -> Written:
        file = int(self._form.is_error(result))
        return Written(entry.position, result.outcome, file, self._form.write(self.lease.batch, result))

    def _is_tried_again(self, entry: LineEntry, error: MillraceError) -> bool:
        if error.reason in _AT_FAULT:
            tries = self._tries[entry.position] = self._tries.get(entry.position, 0) + 1
            if tries >= _MAX_TRIES:
                return False
        elif error.retry_after_s is None:
            return False
        self._again.append(entry)
        if error.reason is Reason.CONCURRENCY_EXCEEDED and self._num_taken > 1:
            # As soon as one of the others has ended.
            self._most_taken = self._num_taken - 1
            return True
        wait_s = min(error.retry_after_s or _RETRY_S, _MAX_RETRY_S)
        self._not_before_s = max(self._not_before_s, time.monotonic() + wait_s)
        return True

    def _end_lines(self) -> None:
        for task in self._under_way:
            task.cancel()

    # Its life.

    async def run(self) -> None:
        """Runs it to its end, or until it is somebody else's."""
        try:
            await self._run()
        except (BatchLeaseLost, SpoolBusy):
            self.is_lost = True
            self._end_lines()
        except (_Stopped, asyncio.CancelledError):
            await self._leave()
        except BadInput as error:
            await self._fail(error.problems)
        except _NeverRead:
            is_cancelled = bool(self.lease.cancelled_unix_s)
            status = BatchStatus.CANCELLED if is_cancelled else BatchStatus.EXPIRED
            problem = f"the batch {'was' if is_cancelled else 'has'} {status} before its input could be read"
            await self._fail((Problem(f"batch_{status}", problem, "input_file_id"),), status)
        except FileNotFoundError:
            message = "the input file is not there any more; upload it again"
            await self._fail((Problem("invalid_input_file", message, "input_file_id"),))
        except MillraceError as error:
            if error.retry_after_s is not None:
                # It passes.
                raise
            await self._fail((Problem(error.reason.openai_code, error.message, error.field),))
        finally:
            self._close()
            self._parts.wake()

    async def _run(self) -> None:
        batch, parts = self.lease.batch, self._parts
        batch.num_takes += 1
        await self._save()
        if batch.num_takes > _MAX_TAKES:
            message = f"{_MAX_TAKES} gateways were lost under it; send its lines in smaller batches"
            raise BadInput(Problem("gateways_lost", message))
        await self._writing(self._prepare, call=parts.transfer)
        if not await parts.call((self._folder / "index").exists):
            batch.num_lines = await self._writing(self._read_input)
        self._spool = await self._writing(self._open_spool)
        self._index = LineIndex(self._folder / "index", self._spool.is_done)
        if batch.status is BatchStatus.VALIDATING:
            batch.status, batch.in_progress_unix_s = BatchStatus.IN_PROGRESS, self._now_s()
        self._count()
        self._began_at = batch.num_answered
        self._tell_reach(parts.usual_rate())
        await self._save()
        parts.wake()
        while not await self._has_ended():
            await asyncio.sleep(_FLUSH_S)
        await self._finish()

    async def _has_ended(self) -> bool:
        """Writes down what has come; whether nothing of it is under way, and nothing more will be."""
        if self._stopping:
            raise _Stopped
        now_s = time.monotonic()
        await self._flush()
        if self._is_ending and self._now_s() >= self.lease.batch.deadline_unix_s:
            self._end_lines()
        if now_s - self._saved_s > self._beat_s:
            await self._save()
            self._tell_reach(self._own_rate())
        if self._num_taken or self._results:
            return False
        return self._is_ending or (self._is_through and not self._again)

    async def _finish(self) -> None:
        batch = self.lease.batch
        batch.status = BatchStatus.FINALIZING
        batch.finalizing_unix_s = batch.finalizing_unix_s or self._now_s()
        batch.detail, batch.problems = "", []
        await self._save()
        left = LineOutcome.CANCELLED if self.lease.cancelled_unix_s else LineOutcome.EXPIRED
        has_left = batch.num_answered < batch.num_lines
        if has_left and not await self._write_rest(left):
            num_left = batch.num_lines - batch.num_answered
            batch.counts[left] += num_left
            batch.problems = [without_room(left, num_left)]
        await self._writing(self._publish, call=self._parts.transfer)
        ended = BatchStatus.CANCELLED if left is LineOutcome.CANCELLED else BatchStatus.EXPIRED
        # One whose end was asked for when all was done already is complete.
        batch.status = ended if has_left or batch.counts[left] else BatchStatus.COMPLETED
        batch.ended_unix_s = self._now_s()
        batch.cancelling_unix_s = self.lease.cancelled_unix_s
        await self._save()
        await self._clear()

    async def _fail(self, problems: tuple[Problem, ...], status: BatchStatus = BatchStatus.FAILED) -> None:
        batch = self.lease.batch
        batch.status, batch.problems, batch.detail = status, list(problems), ""
        batch.cancelling_unix_s = self.lease.cancelled_unix_s
        batch.ended_unix_s = self._now_s()
        try:
            await self._save()
        except (BatchLeaseLost, _Stopped):
            self.is_lost = True
            return
        await self._clear()

    async def _clear(self) -> None:
        """It has ended, and its results are where they stay."""
        self._parts.metrics.add(names.BATCHES_ENDED, status=self.lease.batch.status)
        self._close()
        await self._parts.call(shutil.rmtree, self._folder, ignore_errors=True)

    async def _leave(self) -> None:
        """What has come is written down; lines under way are computed again elsewhere."""
        self._stopping = True
        self._end_lines()
        batch, call, store = self.lease.batch, self._parts.call, self._parts.store
        try:
            if self._spool is not None and self._results:
                await call(self._put_down, self._results)
            self._close()
            batch.num_takes = 0
            await call(store.save, self.lease)
            await call(store.release, self.lease)
        except (BatchLeaseLost, MillraceError, OSError) as error:
            _log.warning("batch %s is left without its last results: %r", batch.id, error)

    def _close(self) -> None:
        index, self._index = self._index, None
        spool, self._spool = self._spool, None
        if index is not None:
            index.close()
        if spool is not None:
            spool.close()

    # What is on the disk.

    def _prepare(self) -> None:
        batch, parts = self.lease.batch, self._parts
        make_private(self._folder)
        self._source = parts.storage.fetch(batch.input_file_id, self._folder, self._beat)

    def _open(self) -> BinaryIO:
        """Its input, to be read as it was sent."""
        batch = self.lease.batch
        if not batch.is_input_sealed:
            return self._source.open("rb")
        return open_sealed(self._source, needed(self._parts.keys).of(batch.input_file_id))

    def _read(self, entry: LineEntry) -> bytes:
        with self._open() as source:
            return read_line(source, entry)

    def _read_input(self) -> int:
        with self._open() as source:
            return index_lines(
                source,
                self._folder,
                self.lease.batch.endpoint,
                max_lines=self._parts.config.max_lines,
                max_line_bytes=self._parts.max_line_bytes,
                goes_on=self._breathe,
            )

    def _open_spool(self) -> Spool:
        batch = self.lease.batch
        seal = needed(self._parts.keys).of(batch.id) if batch.is_sealed else None
        return Spool(self._folder, batch.num_lines, seal)

    def _breathe(self, num_done: int) -> bool:
        """In a thread that is long at work: the lease is renewed."""
        if time.monotonic() - self._saved_s > self._beat_s:
            self._saved_s = time.monotonic()
            self._parts.store.save(self.lease)
        return not self._stopping

    def _beat(self) -> None:
        """The same for the storage of files; raises InterruptedError."""
        if not self._breathe(0):
            raise InterruptedError

    async def _flush(self) -> None:
        results, self._results = self._results, []
        if results:
            await self._writing(self._commit, results)

    def _commit(self, results: list[Written]) -> None:
        """Answers are written into what is to stay free, too, where no line follows them."""
        self._breathe(0)
        if not self._is_ending:
            self._check_room()
        self._put_down(results)

    def _commit_rest(self, results: list[Written], least_bytes: int) -> bool:
        """Whether there was room."""
        self._breathe(0)
        try:
            check_room(self._folder, least_bytes)
            self._put_down(results)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return False
        return True

    def _put_down(self, results: list[Written]) -> None:
        assert self._spool is not None, "results come after it is open"
        before = list(self._spool.counts)
        self._spool.commit(results)
        for outcome in LineOutcome:
            if num := self._spool.counts[outcome] - before[outcome]:
                told = {"tenant": self.tenant, "outcome": outcome.name.lower()}
                self._parts.metrics.add(names.BATCH_LINES, num, **told)
        self._count()

    def _check_room(self) -> None:
        check_room(self._folder, self._parts.config.min_free_bytes)

    async def _write_rest(self, outcome: LineOutcome) -> bool:
        """A result for every line that will not be answered; False where the disk has no room for all. They
        may take half of what is to stay free, because others than batches need it as well.
        """
        assert self._spool is not None, "it was open until now"
        least = min(self._parts.config.min_free_bytes, await self._parts.call(free_bytes, self._folder) // 2)
        with_what = cancelled_error() if outcome is LineOutcome.CANCELLED else expired_error(self.lease.batch)
        index = LineIndex(self._folder / "index", self._spool.is_done)
        try:
            while some := await self._parts.call(self._rest, index, outcome, with_what):
                if not await self._writing(self._commit_rest, some, least):
                    return False
                if self._stopping:
                    raise _Stopped
        finally:
            index.close()
        return True

    def _rest(self, index: LineIndex, outcome: LineOutcome, error: MillraceError) -> list[Written]:
        some: list[Written] = []
        while len(some) < _TOGETHER and (entry := index.next()) is not None:
            named = None
            if entry.fault is not Fault.TOO_LONG:
                named = name_of(self._read(entry))
            result = LineResult(custom_id=named, line=entry.line, outcome=outcome, error=error)
            some.append(self._written(entry, result))
        return some

    def _publish(self) -> None:
        """Results become files; again where it was not known that they had."""
        assert self._spool is not None, "it was open until now"
        batch, store = self.lease.batch, self._parts.store
        now_ms = store.now_ms()
        kept_ms = batch.output_kept_s * 1000 or round(self._parts.config.retention_days * 86_400_000)
        ids = ["", ""]
        for file, (name, purpose) in enumerate(zip(NAMES, self._form.purposes(), strict=True)):
            if self._spool.ends[file]:
                id_ = ids[file] = f"file-{batch.id.rpartition('_')[2]}-{name}"
                source, num_bytes = self._folder / name, self._spool.ends[file]
                if batch.is_sealed:
                    source, num_bytes = self._seal_results(file, id_)
                self._parts.storage.publish(id_, source, self._beat)
                store.add_file(
                    self.lease.tenant,
                    StoredFile(
                        id=id_,
                        purpose=purpose,
                        filename=f"{batch.id}_{name}.jsonl",
                        num_bytes=num_bytes,
                        is_sealed=batch.is_sealed,
                        created_unix_ms=now_ms,
                        expires_unix_ms=now_ms + kept_ms,
                    ),
                    is_result=True,
                )
        batch.output_file_id, batch.error_file_id = ids

    def _seal_results(self, file: int, id_: str) -> tuple[Path, int]:
        """Results as a file that can be read anywhere in it: where it is, and what it has of bytes unsealed.
        Until now each was encrypted by itself.
        """
        assert self._spool is not None, "it was open until now"
        if not self._is_ending:
            self._check_room()
        sealing, num_bytes = SealingPieces(needed(self._parts.keys).of(id_)), 0
        results = self._spool.results(file)

        def pieces() -> Iterator[bytes]:
            nonlocal num_bytes
            for each in results:
                num_bytes += len(each)
                yield sealing.take(each)
            yield sealing.end()

        path = self._folder / f"{NAMES[file]}.whole"
        write_file(path, pieces(), self._beat)
        return path, num_bytes

    async def _writing(
        self, work: Callable[..., Any], *arguments: Any, call: Callable[..., Awaitable[Any]] | None = None
    ) -> Any:
        """Has a thread write; where that cannot be now, says so, and does it again when it may be."""
        while True:
            try:
                done = await (call or self._parts.call)(work, *arguments)
            except InterruptedError as error:
                raise _Stopped from error
            except OSError as error:
                if error.errno not in FULL:
                    raise
                problem = f"the disk of gateway.batches.directory is full ({error.strerror})"
                await self._wait(f"{problem}; it goes on when there is room")
            except MillraceError as error:
                if error.retry_after_s is None and self._now_s() >= self.lease.batch.deadline_unix_s:
                    raise
                # Also what cannot be decrypted: its key may be missing by mistake.
                await self._wait(error.message)
            else:
                if self._pause:
                    _log.warning("batch %s goes on", self.lease.batch.id)
                    self._pause = self.lease.batch.detail = ""
                    self._parts.wake()
                return done
            if self._stopping:
                raise _Stopped
            batch = self.lease.batch
            if self._index is None and self._is_ending and batch.is_open and not batch.num_answered:
                raise _NeverRead

    async def _wait(self, problem: str) -> None:
        """Says what holds it up, and waits for a moment."""
        told = f"paused: {problem}; {expiry(self.lease.batch)}"
        if self._pause != told:
            _log.error("batch %s pauses: %s", self.lease.batch.id, problem)
            self._pause = self.lease.batch.detail = told
        # Who waits is not lost. The database may be on the same disk.
        self.lease.batch.num_takes = 0
        with suppress(MillraceError):
            await self._parts.call(self._parts.store.save, self.lease)
        await asyncio.sleep(_RETRY_S)

    async def _save(self) -> None:
        await self._writing(self._parts.store.save, self.lease)
        self._saved_s = time.monotonic()

    # What is told.

    @property
    def _is_ending(self) -> bool:
        """No further line begins."""
        return bool(self.lease.cancelled_unix_s) or self._now_s() >= self.lease.batch.deadline_unix_s

    @property
    def _beat_s(self) -> float:
        return min(1.0, self._parts.config.lease_s / _BEATS)

    def _now_s(self) -> int:
        return self._parts.store.now_ms() // 1000

    def _count(self) -> None:
        assert self._spool is not None, "it counts"
        batch = self.lease.batch
        if self._spool.counts != batch.counts:
            batch.counts, batch.num_takes = list(self._spool.counts), 0

    def _own_rate(self) -> float:
        num = self.lease.batch.num_answered - self._began_at
        return num / (time.monotonic() - self._began_s) if num >= _ENOUGH_LINES else 0.0

    def _tell_reach(self, rate: float) -> None:
        """Says whether its window is out of reach, at so many lines a second; 0 says nothing."""
        batch = self.lease.batch
        if rate and not self._pause:
            batch.detail = out_of_reach(batch, rate, batch.deadline_unix_s - self._now_s())
