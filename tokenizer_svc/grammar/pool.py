"""Worker processes with budgets, and a queue that is fair between tenants.

One grammar runs in one process at a time. A process that exceeds its time is killed, one that exceeds its
memory dies; either way the sender is told why and a new process takes its place. What takes longer than
most grammars computes at low priority from then on. A tenant uses one worker at a time while others wait, and
tenants whose grammars ran over lately never occupy the last free worker, so that what one tenant sends does
not make another wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque

import msgspec

from services.errors import MillraceError, Reason
from tokenizer_svc.config import CompileConfig
from tokenizer_svc.grammar.nursery import Nursery, Worker
from tokenizer_svc.grammar.request import Refused, WorkerReply, WorkerSetup, WorkRequest

_log = logging.getLogger(__name__)

# A tenant counts as suspect for this long after a grammar of its was killed.
_SUSPECT_S = 60.0
# Nearly all grammars are done by then; one that is not gives way to them.
_PATIENCE_S = 0.03
# The limit counts processor time, of which a busy machine gives little; in wall time it is this much longer.
_MAX_STRETCH = 4.0


class _Job(msgspec.Struct, eq=False):
    tenant: str
    payload: bytes
    done: asyncio.Future[WorkerReply]


class WorkerPool:
    """Runs grammar requests in worker processes. Use from one event loop."""

    def __init__(self, config: CompileConfig, setup: WorkerSetup) -> None:
        self._config = config
        # Waiting jobs of each tenant; the first tenant in order is served next.
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._num_waiting = 0
        self._running: dict[str, int] = {}
        self._suspect_until: dict[str, float] = {}
        self._nursery = Nursery(setup)
        self._idle: list[Worker] = []
        # Work under way: also what a cancelled task that never ran would have had to finish.
        self._tasks: dict[asyncio.Task[None], tuple[Worker, _Job]] = {}
        self._closed = False
        # Killed or dead workers so far, by cause; for metrics.
        self.num_overruns = {"time": 0, "memory": 0}

    @property
    def num_waiting(self) -> int:
        """Grammars that wait for a worker."""
        return self._num_waiting

    async def start(self) -> None:
        """Starts all workers; raises when they cannot load the vocabulary."""
        self._idle = [await self._nursery.worker() for _ in range(self._config.workers)]

    async def close(self) -> None:
        """Kills all workers; jobs that wait or run are refused as DRAINING."""
        self._closed = True
        for queue in self._waiting.values():
            for job in queue:
                _fail(job, MillraceError(Reason.DRAINING, "the service stops", retry_after_s=1.0))
        self._waiting.clear()
        under_way = dict(self._tasks)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        for _, job in under_way.values():
            _fail(job, MillraceError(Reason.DRAINING, "the service stops", retry_after_s=1.0))
        workers = [worker for worker, _ in under_way.values()] + self._idle
        self._idle = []
        for worker in workers:
            worker.kill()
        await self._nursery.close()

    async def run(self, request: WorkRequest, *, tenant: str) -> WorkerReply:
        """The worker's reply. Raises QUEUE_LIMIT_EXCEEDED when too many wait."""
        queue = self._waiting.get(tenant, ())
        if len(queue) >= self._config.max_queued_per_tenant or self._num_waiting >= self._config.max_queued:
            raise MillraceError(
                Reason.QUEUE_LIMIT_EXCEEDED,
                f"{len(queue)} grammars of this tenant and {self._num_waiting} in all wait to be compiled; "
                f"the limits are {self._config.max_queued_per_tenant} and {self._config.max_queued}; "
                "retry later",
                field="response_format",
                retry_after_s=1.0,
            )
        job = _Job(tenant, msgspec.msgpack.encode(request), asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(job)
        self._num_waiting += 1
        self._dispatch()
        return await job.done

    def _dispatch(self) -> None:
        while self._idle and not self._closed:
            job = self._next_job()
            if job is None:
                return
            self._running[job.tenant] = self._running.get(job.tenant, 0) + 1
            suspect = self._is_suspect(job.tenant)
            # New workers, which touch their memory for the first time, stand at the front.
            worker = self._idle.pop(0 if suspect else -1)
            if suspect:
                worker.give_way(wholly=True)
            task = asyncio.create_task(self._serve(worker, job))
            self._tasks[task] = (worker, job)
            task.add_done_callback(self._finished)

    def _is_suspect(self, tenant: str) -> bool:
        return self._suspect_until.get(tenant, 0.0) > time.monotonic()

    def _next_job(self) -> _Job | None:
        num_suspects = sum(count for tenant, count in self._running.items() if self._is_suspect(tenant))
        for tenant, queue in self._waiting.items():
            suspect = self._is_suspect(tenant)
            if self._running.get(tenant, 0) and (suspect or len(self._waiting) > 1 or len(self._idle) < 2):
                continue
            if suspect and num_suspects >= max(1, self._config.workers - 1):
                continue
            job = queue.popleft()
            self._num_waiting -= 1
            del self._waiting[tenant]
            if queue:
                # To the end: every other tenant comes before this one's next job.
                self._waiting[tenant] = queue
            return job
        return None

    async def _serve(self, worker: Worker, job: _Job) -> None:
        impatience = asyncio.get_running_loop().call_later(_PATIENCE_S, self._lose_patience, worker)
        try:
            answer = await self._within_limit(worker, job.payload)
            reply = msgspec.msgpack.decode(answer, type=WorkerReply)
            if reply.defect:
                _log.error("a grammar could not be compiled: %s", reply.defect)
        except TimeoutError:
            reply = self._overrun(job, "time")
        except EOFError:
            reply = self._overrun(job, "memory")
        finally:
            impatience.cancel()
        self._running[job.tenant] -= 1
        if not self._running[job.tenant]:
            del self._running[job.tenant]
        if not job.done.done():
            job.done.set_result(reply)
        if worker.yielding or (reply.refused is not None and reply.refused.overrun):
            await self._replace(worker)
        else:
            self._idle.append(worker)
        self._dispatch()

    def _lose_patience(self, worker: Worker) -> None:
        if not worker.yielding:
            worker.give_way()

    async def _within_limit(self, worker: Worker, payload: bytes) -> bytes:
        limit_s = self._config.time_limit_s
        used_before_s, began_s = worker.processor_s(), time.monotonic()
        work = asyncio.ensure_future(worker.run(payload))
        try:
            wait_s = limit_s
            while wait_s > 0:
                await asyncio.wait({work}, timeout=wait_s)
                if work.done():
                    return work.result()
                left_s = limit_s - (worker.processor_s() - used_before_s)
                wait_s = min(left_s, began_s + limit_s * _MAX_STRETCH - time.monotonic())
                if left_s < limit_s / 20:
                    break
            raise TimeoutError
        finally:
            work.cancel()
            await asyncio.wait({work})

    def _overrun(self, job: _Job, cause: str) -> WorkerReply:
        self.num_overruns[cause] += 1
        self._suspect_until[job.tenant] = time.monotonic() + _SUSPECT_S
        if cause == "time":
            message = (
                f"compiling takes longer than the limit of {self._config.time_limit_s:g} s; "
                "use a simpler grammar: fewer alternatives, smaller repetition counts, less nesting"
            )
        else:
            message = (
                f"compiling needs more memory than the limit of {self._config.memory_limit_bytes} bytes, or "
                "is nested too deeply; use a simpler grammar"
            )
        return WorkerReply(refused=Refused(message=message, field="response_format", overrun=cause))

    async def _replace(self, worker: Worker) -> None:
        worker.kill()
        self._idle.insert(0, await self._nursery.worker())

    def _finished(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and task.exception() is not None:
            _log.error("a grammar worker could not be replaced", exc_info=task.exception())


def _fail(job: _Job, error: MillraceError) -> None:
    if not job.done.done():
        job.done.set_exception(error)
