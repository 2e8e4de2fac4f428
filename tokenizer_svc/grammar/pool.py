"""Worker processes with budgets, and a queue that is fair between tenants.

One grammar runs in one process at a time. A process that exceeds its time is killed, one that exceeds its
memory dies; either way the sender is told why and a new process takes its place. A tenant uses one worker at
a time while others wait, and tenants whose grammars ran over lately never occupy the last free worker, so
that what one tenant sends does not make another wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections import OrderedDict, deque

import msgspec

from services.errors import MillraceError, Reason
from tokenizer_svc.config import CompileConfig
from tokenizer_svc.grammar.request import Refused, WorkerReply, WorkerSetup, WorkRequest
from tokenizer_svc.grammar.worker import READY

_log = logging.getLogger(__name__)

# Replies are bounded by the artifact limit; stream buffers only need to hold one read.
_STREAM_LIMIT = 1 << 20
# A tenant counts as suspect for this long after a grammar of its was killed.
_SUSPECT_S = 60.0
_SUSPECT_NICENESS = 10
# A new process has this long to load the vocabulary.
_START_LIMIT_S = 60.0


class _Worker:
    """One process. `run` either answers or leaves the process dead."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        # Whether it gives way to everything else; that cannot be taken back.
        self.yielding = False

    @classmethod
    async def start(cls, setup: WorkerSetup) -> _Worker:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tokenizer_svc.grammar.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # A process that runs out of memory writes more there than a log should hold.
            stderr=asyncio.subprocess.DEVNULL,
            limit=_STREAM_LIMIT,
        )
        worker = cls(process)
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                await worker._send(msgspec.msgpack.encode(setup))
                if await worker._receive() != READY:
                    raise EOFError("the worker did not become ready")
        except BaseException:
            await worker.kill()
            raise
        return worker

    def give_way(self) -> None:
        """From now on it computes when nothing else wants to."""
        if not self.yielding:
            self.yielding = True
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._process.pid, _SUSPECT_NICENESS)

    async def run(self, payload: bytes) -> bytes:
        """The reply to one request; EOFError when the process died."""
        try:
            await self._send(payload)
            return await self._receive()
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError("the worker died") from error

    async def kill(self) -> None:
        """Ends the process at once and waits for it to be gone."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()

    async def _send(self, payload: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(len(payload).to_bytes(4, "little") + payload)
        await self._process.stdin.drain()

    async def _receive(self) -> bytes:
        assert self._process.stdout is not None
        header = await self._process.stdout.readexactly(4)
        return await self._process.stdout.readexactly(int.from_bytes(header, "little"))


class _Job(msgspec.Struct, eq=False):
    tenant: str
    payload: bytes
    done: asyncio.Future[WorkerReply]


class WorkerPool:
    """Runs grammar requests in worker processes. Use from one event loop."""

    def __init__(self, config: CompileConfig, setup: WorkerSetup) -> None:
        self._config = config
        self._setup = setup
        # Waiting jobs of each tenant; the first tenant in order is served next.
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._num_waiting = 0
        self._running: dict[str, int] = {}
        self._suspect_until: dict[str, float] = {}
        self._idle: list[_Worker] = []
        self._num_starting = 0
        # Work under way: also what a cancelled task that never ran would have had to finish.
        self._tasks: dict[asyncio.Task[None], tuple[_Worker, _Job]] = {}
        self._closed = False
        # Killed or dead workers so far, by cause; for metrics.
        self.num_overruns = {"time": 0, "memory": 0}

    @property
    def num_waiting(self) -> int:
        """Grammars that wait for a worker."""
        return self._num_waiting

    async def start(self) -> None:
        """Starts all workers; raises when they cannot load the vocabulary."""
        self._idle = list(
            await asyncio.gather(*(_Worker.start(self._setup) for _ in range(self._config.workers)))
        )

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
        await asyncio.gather(*(worker.kill() for worker in workers))

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
            worker = self._pick(self._is_suspect(job.tenant))
            task = asyncio.create_task(self._serve(worker, job))
            self._tasks[task] = (worker, job)
            task.add_done_callback(self._finished)

    def _pick(self, suspect: bool) -> _Worker:
        worker = next((each for each in self._idle if each.yielding == suspect), self._idle[-1])
        self._idle.remove(worker)
        if suspect:
            worker.give_way()
        return worker

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

    async def _serve(self, worker: _Worker, job: _Job) -> None:
        try:
            async with asyncio.timeout(self._config.time_limit_s):
                answer = await worker.run(job.payload)
            reply = msgspec.msgpack.decode(answer, type=WorkerReply)
            if reply.defect:
                _log.error("a grammar could not be compiled: %s", reply.defect)
        except TimeoutError:
            reply = self._overrun(job, "time")
        except EOFError:
            reply = self._overrun(job, "memory")
        self._running[job.tenant] -= 1
        if not self._running[job.tenant]:
            del self._running[job.tenant]
        if not job.done.done():
            job.done.set_result(reply)
        if reply.refused is not None and reply.refused.overrun:
            await self._replace(worker)
        else:
            self._idle.append(worker)
        self._dispatch()

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

    async def _replace(self, worker: _Worker) -> None:
        await worker.kill()
        self._idle.append(await _Worker.start(self._setup))

    def _finished(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and task.exception() is not None:
            _log.error("a grammar worker could not be replaced", exc_info=task.exception())


def _fail(job: _Job, error: MillraceError) -> None:
    if not job.done.done():
        job.done.set_exception(error)
