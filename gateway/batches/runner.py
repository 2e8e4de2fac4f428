"""The batches that one gateway runs: takes those that nobody runs, and lets their lines begin in turn."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from contract.engines import EngineLoad
from contract.errors import MillraceError
from gateway.batches.job import BatchJob, JobParts
from gateway.batches.lines import LineEntry
from gateway.batches.mark import AskedMark
from gateway.batches.shares import FairShares
from gateway.batches.types import RequestBatch
from gateway.batches.window import LineWindow, WhatElse
from observability.emit import names

_log = logging.getLogger(__name__)
# How often it is looked whether lines may begin, when nothing else says so; and where some wait for a moment
# that passes, such as others' first tokens.
_LOOK_S, _SOON_S = 0.05, 0.01
_TAKE_S = 1.0
# Batches that a gateway runs at a time, and takes at a time.
_MAX_JOBS = 64
_TAKEN_TOGETHER = 8
# A request of others waits when its first token is late by this share of its target; without a target after
# this many seconds.
_LATE_SHARE, _LATE_S = 0.1, 0.1
# What has not come to an engine for longer waits for something else than lines, such as a model to be loaded.
_ARRIVES_S = 1.0
# Seconds over which lines a second are measured.
_RATE_S = 30.0


class OtherRequest(NamedTuple):
    """A request at a connection; the monotonic clock, in seconds."""

    key: object
    received_s: float
    # None while it waits for its first token.
    first_s: float | None
    # Of its tier, for the first token.
    target_s: float | None


class Surroundings(Protocol):
    """What else the gateway does."""

    draining: bool

    def loads(self) -> list[EngineLoad]:
        """The reports of engines that take requests."""
        ...

    def num_engines(self) -> int:
        """Engines that take requests for the models of the lines under way."""
        ...

    def has_others(self) -> bool:
        """Whether engines work for other gateways, by their reports."""
        ...

    def others(self) -> list[OtherRequest]:
        """The requests at connections, from when they are read."""
        ...

    def asked_s(self) -> float | None:
        """When the last of them came; None where none did."""
        ...

    def tightest_s(self) -> float:
        """The shortest target of a tier for the first token; 0 where none has one."""
        ...


class BatchRunner:
    """See above."""

    def __init__(
        self,
        parts: JobParts,
        window: LineWindow,
        weight: Callable[[str], float],
        surroundings: Callable[[], Surroundings],
    ) -> None:
        """`surroundings` raises while nothing is served yet."""
        self._parts = parts
        self._window = window
        self._shares = FairShares(weight)
        self._surroundings = surroundings
        self._jobs: dict[str, BatchJob] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lines: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Event()
        self._loops: list[asyncio.Task[None]] = []
        self._others = SeenOthers(window)
        self._mark = AskedMark(parts.folder.parent / "asked")
        # When others had last asked this gateway as it told the other gateways; when those told the same.
        self._told_s: float | None = None
        self._heard_s: float | None = None
        # Lines that have ended, halved every _RATE_S.
        self._num_ended, self._measured_s, self._since_s = 0.0, 0.0, time.monotonic()

    def start(self) -> None:
        """Begins to look for batches."""
        self._parts.metrics.begin(names.BATCHES_ENDED)
        self._parts.metrics.set_function(names.BATCH_LINES_RUNNING, lambda: float(len(self._lines)))
        self._loops = [
            asyncio.create_task(self._keep_taking(), name="take batches"),
            asyncio.create_task(self._keep_beginning(), name="begin lines"),
        ]

    async def close(self) -> None:
        """Leaves every batch to other gateways."""
        for loop in self._loops:
            loop.cancel()
        for job in self._jobs.values():
            job.stop()
        await asyncio.gather(*self._loops, *self._lines, return_exceptions=True)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def wake(self) -> None:
        """Something changed: a batch may be there, or a line may begin."""
        self._changed.set()

    def detail(self, tenant: str, id_: str) -> str | None:
        """What holds a batch up now, "" where nothing does; None where this gateway does not run it."""
        job = self._jobs.get(id_)
        return None if job is None or job.tenant != tenant or job.is_lost else job.lease.batch.detail

    def cancel(self, tenant: str, batch: RequestBatch) -> None:
        """Lets no further line of a batch begin where this gateway runs it; others learn it by the row."""
        job = self._jobs.get(batch.id)
        if job is not None and job.tenant == tenant:
            job.lease.cancelled_unix_s = batch.cancelling_unix_s

    def rate(self) -> float:
        """Lines a second of all batches lately; 0 while nothing was measured."""
        seconds = self._measured_s + time.monotonic() - self._since_s
        return self._num_ended / seconds if self._num_ended >= 1 and seconds > 1 else 0.0

    def usual_rate(self) -> float:
        """Of that, what one batch among those that run may expect."""
        return self.rate() / max(1, len(self._jobs))

    # Batches.

    async def _keep_taking(self) -> None:
        while True:
            try:
                room = min(_TAKEN_TOGETHER, _MAX_JOBS - len(self._jobs))
                if room > 0 and not self._surroundings().draining:
                    for lease in await self._parts.call(self._parts.store.take, room, tuple(self._jobs)):
                        self._begin(BatchJob(lease, self._parts))
                await self._tell()
                await self._exchange()
            except MillraceError:
                # Nothing is served yet, or the database cannot be used: that is in the log.
                pass
            except Exception:
                _log.exception("batches cannot be taken, will retry")
            await asyncio.sleep(min(_TAKE_S, self._parts.config.lease_s / 4))

    async def _tell(self) -> None:
        """Writes what operators see."""
        store, metrics = self._parts.store, self._parts.metrics
        running = Counter(job.state for job in self._jobs.values())
        for status in names.BATCHES_RUNNING.values["status"]:
            metrics.set(names.BATCHES_RUNNING, running[status], status=status)
        since_ms = await self._parts.call(store.waiting_since_ms)
        metrics.set(names.BATCHES_OLDEST, (store.now_ms() - since_ms) / 1000 if since_ms else 0.0)

    async def _exchange(self) -> None:
        """Gateways tell each other that they are asked by others than batches."""
        asked_s = self._surroundings().asked_s()
        try:
            has_heard = await self._parts.call(self._mark.exchange, is_asked=asked_s != self._told_s)
        except OSError as error:
            _log.warning("gateways cannot tell each other that they are asked: %s", error)
            return
        self._told_s = asked_s
        if has_heard:
            self._heard_s = time.monotonic()

    def _begin(self, job: BatchJob) -> None:
        id_ = job.lease.batch.id
        self._jobs[id_] = job
        task = asyncio.create_task(self._run(job), name=f"batch {id_}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, job: BatchJob) -> None:
        try:
            await job.run()
        except Exception:
            # Its lease runs out, and somebody goes on with it.
            _log.exception("batch %s is interrupted", job.lease.batch.id)
        finally:
            job.stop()
            del self._jobs[job.lease.batch.id]
            if not any(other.tenant == job.tenant for other in self._jobs.values()):
                self._shares.forget(job.tenant)

    # Lines.

    async def _keep_beginning(self) -> None:
        are_held = False
        while True:
            try:
                async with asyncio.timeout(_SOON_S if are_held else _LOOK_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            are_held = False
            try:
                are_held = self._begin_lines()
            except MillraceError:
                # Nothing is served yet.
                pass
            except Exception:
                _log.exception("lines of batches cannot begin, will retry")

    def _begin_lines(self) -> bool:
        """Whether none is under way though there is no room: that is soon over."""
        now_s, around = time.monotonic(), self._surroundings()
        others = around.others()
        self._others.look(others, now_s, num_lines=len(self._lines))
        if not self._jobs or around.draining:
            return False
        self._window.look(now_s, what_else(around, others, now_s, self._heard_s))
        while self._window.has_room(len(self._lines), now_s):
            waiting: dict[str, BatchJob] = {}
            for job in self._jobs.values():
                if job.wants(now_s):
                    # Of a tenant's the one that was taken first.
                    waiting.setdefault(job.tenant, job)
            if not waiting:
                return False
            job = waiting[self._shares.choose(waiting)]
            entry = job.take()
            if entry is not None:
                task = asyncio.create_task(self._line(job, entry), name="line of a batch")
                self._lines.add(task)
                task.add_done_callback(self._ended)
                self._window.began(now_s)
        return not self._lines

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._lines.discard(task)
        self._changed.set()

    async def _line(self, job: BatchJob, entry: LineEntry) -> None:
        expected, took, began_s = self._shares.begin(job.tenant), None, time.monotonic()
        try:
            took = await job.answer(entry)
        finally:
            self._shares.end(job.tenant, expected, took)
            if took is not None:
                now_s = time.monotonic()
                self._window.ended(now_s, now_s - began_s)
                self._measure()

    def _measure(self) -> None:
        self._num_ended += 1
        now_s = time.monotonic()
        if now_s - self._since_s > _RATE_S:
            self._measured_s, self._since_s = (self._measured_s + now_s - self._since_s) / 2, now_s
            self._num_ended /= 2


class SeenOthers:
    """Tells a window of others' first tokens, each once."""

    def __init__(self, window: LineWindow) -> None:
        self._window = window
        self._seen: set[object] = set()
        # Since when no line is under way.
        self._no_line_since_s: float | None = None

    def look(self, others: list[OtherRequest], now_s: float, *, num_lines: int) -> None:
        """What there is now."""
        if num_lines:
            self._no_line_since_s = None
        elif self._no_line_since_s is None:
            self._no_line_since_s = now_s
        for other in others:
            if other.first_s is not None and other.key not in self._seen:
                since_s = self._no_line_since_s
                is_alone = since_s is not None and since_s <= other.received_s
                self._window.first_token(other.first_s - other.received_s, now_s, is_alone=is_alone)
        self._seen = {other.key for other in others if other.first_s is not None}


def what_else(
    around: Surroundings, others: list[OtherRequest], now_s: float, heard_s: float | None
) -> WhatElse:
    """What a window is told; others asked another gateway as lately as `heard_s`."""
    loads = around.loads()
    begin = [other for other in others if other.first_s is None]
    late = any(
        now_s - other.received_s > (_LATE_S if other.target_s is None else other.target_s * _LATE_SHARE)
        for other in begin
    )
    tightest_s = around.tightest_s()
    # What a request that came now would wait for, by the engines' own measurements.
    forecast_s = [
        load.pending_prefill_tokens / load.prefill_tokens_per_s for load in loads if load.prefill_tokens_per_s
    ]
    queued, num_engines = any(load.num_waiting for load in loads), around.num_engines()
    queued |= bool(tightest_s) and any(each > tightest_s * _LATE_SHARE for each in forecast_s)
    return WhatElse(
        num_engines=num_engines,
        others_run=bool(others) or around.has_others(),
        # With more engines there is one where no first token is computed.
        others_begin=len(begin) >= max(1, num_engines),
        others_wait=late,
        queued=queued,
        asked_s=max((each for each in (around.asked_s(), heard_s) if each is not None), default=None),
    )


def surroundings_of(pipeline: Any) -> Surroundings:
    """What a pipeline does for whoever is no batch."""
    return _OfPipeline(pipeline)


class _OfPipeline:
    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self.draining: bool = pipeline.draining

    def loads(self) -> list[EngineLoad]:
        return [each.load for each in self._pipeline.attempts.fleet.ready]

    def num_engines(self) -> int:
        attempts, fleet = self._pipeline.books.running, self._pipeline.attempts.fleet
        models = {each.stream.model for each in attempts if each.call.caller.identity.in_batch}
        if not models:
            # Which model the first lines name is known when one of them is under way.
            return min(1, len(fleet.ready))
        return sum(map(fleet.num_ready, models))

    def has_others(self) -> bool:
        ready = self._pipeline.attempts.fleet.ready
        return any(each.load.num_running + each.load.num_waiting > each.num_open for each in ready)

    def others(self) -> list[OtherRequest]:
        found = []
        for attempt in self._pipeline.books.running:
            call = attempt.call
            if not call.caller.identity.in_batch:
                target_ms = call.tier.config.ttft_target_ms
                target_s = None if target_ms is None else target_ms / 1000
                first_s = attempt.meter.first_output_s
                found.append(OtherRequest(attempt, call.caller.received_s, first_s, target_s))
        now_s = time.monotonic()
        for key, caller in self._pipeline.arriving.items():
            if not caller.identity.in_batch and now_s - caller.received_s < _ARRIVES_S:
                found.append(OtherRequest(key, caller.received_s, None, None))
        return found

    def asked_s(self) -> float | None:
        asked_s: float | None = self._pipeline.asked_s
        return asked_s

    def tightest_s(self) -> float:
        targets: Mapping[str, Any] = self._pipeline.tiers.all
        every = [tier.config.ttft_target_ms for tier in targets.values()]
        return min((each / 1000 for each in every if each), default=0.0)
