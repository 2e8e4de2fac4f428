"""Worker processes with budgets, and a queue that is fair between tenants.

One request runs in one process at a time. A process that exceeds its time is killed, one that exceeds its
memory dies; either way the sender is told why. What takes longer than most computes at low priority from then
on, and counts against its tenant's account. Who is in debt is served by processes of the lowest priority,
which run only when nothing else wants to and are kept for such work, so that nothing has to be started anew.
A tenant uses one worker at a time while others wait. Of its long work one part computes, the rest is stopped
meanwhile: what is quick passes it, and others meet one of its workers, not all.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import msgspec

from contract.errors import MillraceError, Reason
from runtime.hang import ProcessSilence
from tokenizer_svc.config import CompileConfig
from tokenizer_svc.grammar.request import (
    EncodedGrammar,
    EncodedPrompt,
    ValidationRequest,
    WorkerReply,
    WorkerSetup,
    WorkRefusal,
)
from tokenizer_svc.workers.accounts import Accounts
from tokenizer_svc.workers.fork_server import ForkServer, Payload, Worker

_log = logging.getLogger(__name__)

# Nearly all grammars are done by then, in processor time; one that is not gives way to them.
_PATIENCE_S = 0.01
# A job whose worker was killed is charged this much: its tenant is in debt for a while.
_OVERRUN_CHARGE_S = 6.0
# The limit counts processor time, of which a busy machine gives little; in wall time it is this much longer.
_MAX_STRETCH = 4.0
_PRUNE_EVERY = 1024
# Memory that encoding takes for each byte of one text with the bundled vocabulary: 180, and what lies beside.
_BYTES_PER_TEXT_BYTE = 190


class _Job(msgspec.Struct, eq=False):
    tenant: str
    payload: Payload
    # Processor time that it may take.
    limit_s: float
    # Field and name of what takes too long, when it does.
    field: str
    what: str
    advice: str
    # The reason of the refusal when it takes too much.
    reason: Reason
    done: asyncio.Future[WorkerReply]
    # Whether it has lost its ordinary priority, or is done.
    stale: bool = False
    # The process that computes it, once it has turned out to be long.
    worker: Worker | None = None
    # Since when it is stopped in favour of its tenant's other long work (None: it is not), and for how long
    # it was before.
    held_at_s: float | None = None
    held_s: float = 0.0
    # Processor time that it has used once it is over.
    used_s: float = 0.0

    def total_held_s(self) -> float:
        now_s = time.monotonic()
        return self.held_s + (0.0 if self.held_at_s is None else now_s - self.held_at_s)


class _WorkerHangs(Exception):
    """A process stands still in the middle of a job."""


class WorkerPool:
    """Runs requests in worker processes. Use from one event loop."""

    def __init__(self, config: CompileConfig, setup: WorkerSetup, *, silence_limit_s: float = 4.0) -> None:
        self._config = config
        self._silence_limit_s = silence_limit_s
        # Waiting jobs of each tenant; the first tenant in order is served next.
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._num_waiting = 0
        self._running: dict[str, int] = {}
        # Running jobs that still compute at ordinary priority, and how many of them a tenant may have: at
        # most half of the machine.
        self._fresh: dict[str, int] = {}
        self._max_fresh = max(1, (os.cpu_count() or 1) // 2)
        # Long jobs of each tenant in the order in which they turned out to be; so many of them compute, the
        # others are stopped.
        self._long: dict[str, list[_Job]] = {}
        self._max_long = max(1, (os.cpu_count() or 1) // 4)
        self._accounts = Accounts()
        self._num_charges = 0
        self._fork_server = ForkServer(setup)
        self._prompt_limit_s = setup.limits.max_prepare_s
        self._idle: list[Worker] = []
        # Workers of the lowest priority, beside the others; made when they are first needed.
        self._idle_slow: list[Worker] = []
        self._num_slow = 0
        self._workers: set[Worker] = set()
        # Work under way: also what a cancelled task that never ran would have had to finish.
        self._tasks: dict[asyncio.Task[None], _Job] = {}
        self._closed = False
        # Killed or dead workers so far, by cause; for metrics.
        self.num_overruns = {"time": 0, "memory": 0}

    @property
    def num_waiting(self) -> int:
        """Jobs that wait for a worker."""
        return self._num_waiting

    def in_debt(self, tenant: str) -> bool:
        """Whether what the tenant asks for waits for processor time that nobody else wants."""
        return self._accounts.in_debt(tenant)

    async def start(self) -> None:
        """Starts all workers; raises when they cannot load the vocabulary."""
        self._idle = [await self._new() for _ in range(self._config.workers)]
        # Jobs that came before there was a worker.
        self._dispatch()

    async def close(self) -> None:
        """Kills all workers; jobs that wait or run are refused as DRAINING."""
        self._closed = True
        jobs = [job for queue in self._waiting.values() for job in queue]
        self._waiting.clear()
        jobs += self._tasks.values()
        for job in jobs:
            if not job.done.done():
                job.done.set_exception(MillraceError(Reason.DRAINING, "the service stops", retry_after_s=1.0))
        under_way = list(self._tasks)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        for worker in list(self._workers):
            self._kill(worker)
        await self._fork_server.close()

    def num_queued(self, tenant: str) -> int:
        """Jobs of a tenant that no worker has begun."""
        return len(self._waiting.get(tenant, ()))

    async def run(
        self, request: EncodedGrammar | ValidationRequest | EncodedPrompt, *, tenant: str
    ) -> WorkerReply:
        """The worker's reply. Raises QUEUE_LIMIT_EXCEEDED when too many wait.

        What nobody waits for any more, because this was cancelled, is given up.
        """
        queue = self._waiting.get(tenant, ())
        if len(queue) >= self._config.max_queued_per_tenant or self._num_waiting >= self._config.max_queued:
            raise MillraceError(
                Reason.QUEUE_LIMIT_EXCEEDED,
                f"{len(queue)} grammars or large prompts of this tenant and {self._num_waiting} in all "
                f"wait for a worker; the limits are {self._config.max_queued_per_tenant} and "
                f"{self._config.max_queued}; retry later",
                field="response_format",
                retry_after_s=1.0,
            )
        job = self._job(request, tenant)
        self._waiting.setdefault(tenant, deque()).append(job)
        self._num_waiting += 1
        self._dispatch()
        try:
            return await job.done
        except asyncio.CancelledError:
            self._withdraw(job)
            raise

    def is_waiting(self, request: EncodedGrammar, *, tenant: str) -> bool:
        """Whether no worker has begun the tenant's request."""
        return any(job.payload[0] is request.payload for job in self._waiting.get(tenant, ()))

    def _withdraw(self, job: _Job) -> None:
        """Takes a job that nobody waits for out of the queue at once."""
        queue = self._waiting.get(job.tenant)
        if queue is not None and job in queue:
            queue.remove(job)
            self._num_waiting -= 1
            if not queue:
                del self._waiting[job.tenant]
            self._dispatch()

    def _job(self, request: EncodedGrammar | ValidationRequest | EncodedPrompt, tenant: str) -> _Job:
        done: asyncio.Future[WorkerReply] = asyncio.get_running_loop().create_future()
        if isinstance(request, EncodedPrompt):
            return _Job(
                tenant=tenant,
                payload=request.payload,
                limit_s=self._prompt_limit_s,
                field=request.field,
                what="rendering and encoding",
                advice="send less text, or fewer tools",
                reason=Reason.REQUEST_TOO_LARGE,
                done=done,
            )
        encoded = isinstance(request, EncodedGrammar)
        return _Job(
            tenant=tenant,
            payload=(
                request.payload if isinstance(request, EncodedGrammar) else msgspec.msgpack.encode(request),
            ),
            limit_s=self._config.time_limit_s,
            field="response_format" if encoded else "schema_json",
            what="compiling" if encoded else "judging by this schema",
            advice="use a simpler grammar: fewer alternatives, smaller repetition counts, less nesting",
            reason=Reason.GRAMMAR_REFUSED,
            done=done,
        )

    def _dispatch(self) -> None:
        while not self._closed and (job := self._next_job()) is not None:
            self._running[job.tenant] = self._running.get(job.tenant, 0) + 1
            self._fresh[job.tenant] = self._fresh.get(job.tenant, 0) + 1
            worker: Worker | None
            slow = self._accounts.in_debt(job.tenant)
            if slow:
                worker = self._idle_slow.pop() if self._idle_slow else None
                self._num_slow += worker is None
            else:
                # Whoever has worked last has most in the processor's caches; new ones stand at the front.
                worker = self._idle.pop()
            task = asyncio.create_task(self._serve(worker, job, slow=slow))
            self._tasks[task] = job
            task.add_done_callback(self._finished)

    def _next_job(self) -> _Job | None:
        max_slow = max(1, self._config.workers - 1)
        for tenant, queue in list(self._waiting.items()):
            busy = self._running.get(tenant, 0)
            if self._accounts.in_debt(tenant):
                fits = not busy and (self._idle_slow or self._num_slow < max_slow)
            else:
                fits = self._idle and self._fresh.get(tenant, 0) < self._max_fresh
                fits = fits and not (busy and (len(self._waiting) > 1 or len(self._idle) < 2))
            if not fits:
                continue
            job = queue.popleft()
            self._num_waiting -= 1
            del self._waiting[tenant]
            if queue:
                # To the end: every other tenant comes before this one's next job.
                self._waiting[tenant] = queue
            return job
        return None

    async def _serve(self, worker: Worker | None, job: _Job, *, slow: bool) -> None:
        alive = False
        try:
            if worker is None:
                worker = await self._new(lowest=True)
            try:
                reply, alive = await self._reply(worker, job)
            except _WorkerHangs:
                # Nobody has seen a result of it. If the next one hangs too, it may be the request.
                self._no_longer_long(job)
                self._kill(worker)
                worker = await self._new(lowest=slow)
                reply, alive = await self._reply(worker, job)
            self._charge(job, reply, alive)
            if not job.done.done():
                job.done.set_result(reply)
        finally:
            self._no_longer_fresh(job)
            self._no_longer_long(job)
            self._running[job.tenant] -= 1
            if not self._running[job.tenant]:
                del self._running[job.tenant]
            self._num_slow -= slow and not alive
        if slow and alive:
            self._idle_slow.append(worker)
        elif slow:
            self._kill(worker)
        elif alive and not worker.yielding:
            self._idle.append(worker)
        else:
            self._kill(worker)
            self._idle.insert(0, await self._new())
        self._dispatch()

    async def _reply(self, worker: Worker, job: _Job) -> tuple[WorkerReply, bool]:
        """The reply, and whether the worker is still of use."""
        watch = asyncio.ensure_future(self._lose_patience(worker, job))
        try:
            return await self._answer(worker, job)
        finally:
            watch.cancel()

    async def _answer(self, worker: Worker, job: _Job) -> tuple[WorkerReply, bool]:
        try:
            answer = await self._within_limit(worker, job)
            reply = msgspec.msgpack.decode(answer, type=WorkerReply)
            if reply.defect:
                _log.error("a request could not be prepared: %s", reply.defect)
            return reply, True
        except TimeoutError:
            return self._overrun(job, "time"), False
        except EOFError:
            return self._overrun(job, "memory"), False

    async def _lose_patience(self, worker: Worker, job: _Job) -> None:
        used_before_s = worker.processor_s()
        await self._until(lambda: _PATIENCE_S - (worker.processor_s() - used_before_s))
        worker.give_way()
        self._no_longer_fresh(job)
        job.worker = worker
        self._long.setdefault(job.tenant, []).append(job)
        self._pause(job.tenant)
        self._dispatch()
        long_before_s = worker.processor_s()
        await self._until(
            lambda: self._accounts.gentle_s(job.tenant) - (worker.processor_s() - long_before_s)
        )
        worker.give_way(wholly=True)

    async def _until(self, left_s: Callable[[], float]) -> None:
        """Until no processor time is left. A worker that waits for the processor is looked at again, not too
        often.
        """
        while (wait_s := left_s()) > 0:
            await asyncio.sleep(max(wait_s, _PATIENCE_S / 4))

    def _no_longer_fresh(self, job: _Job) -> None:
        if job.stale:
            return
        job.stale = True
        self._fresh[job.tenant] -= 1
        if not self._fresh[job.tenant]:
            del self._fresh[job.tenant]

    def _no_longer_long(self, job: _Job) -> None:
        jobs = self._long.get(job.tenant, [])
        if job not in jobs:
            return
        jobs.remove(job)
        if job.held_at_s is not None and job.worker is not None:
            # It had answered when it was stopped: whoever is next must not find it so.
            job.worker.go_on()
        if jobs:
            self._pause(job.tenant)
        else:
            del self._long[job.tenant]

    def _pause(self, tenant: str) -> None:
        for place, job in enumerate(self._long[tenant]):
            held = place >= self._max_long
            assert job.worker is not None
            if held and job.held_at_s is None:
                job.held_at_s = time.monotonic()
                job.worker.stop()
            elif not held and job.held_at_s is not None:
                job.held_s, job.held_at_s = job.total_held_s(), None
                job.worker.go_on()

    async def _within_limit(self, worker: Worker, job: _Job) -> bytearray:
        used_before_s, began_s = worker.processor_s(), time.monotonic()
        work = asyncio.ensure_future(worker.run(job.payload))
        hang = asyncio.ensure_future(self._hang(worker, job))
        try:
            wait_s = job.limit_s
            while wait_s > 0:
                waited_for: set[asyncio.Future[Any]] = {work, hang, job.done}
                await asyncio.wait(waited_for, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    return work.result()
                if job.done.done():
                    # Whoever asked is gone.
                    break
                if hang.done():
                    raise _WorkerHangs
                left_s = job.limit_s - (worker.processor_s() - used_before_s)
                until_s = began_s + job.limit_s * _MAX_STRETCH + job.total_held_s()
                wait_s = min(left_s, until_s - time.monotonic())
                if left_s < job.limit_s / 20:
                    break
            raise TimeoutError
        finally:
            job.used_s = worker.processor_s() - used_before_s
            hang.cancel()
            work.cancel()
            await asyncio.wait({work})

    async def _hang(self, worker: Worker, job: _Job) -> None:
        """Returns when the worker neither computes nor waits for a processor, though nobody holds it."""
        silence = ProcessSilence(self._silence_limit_s, worker.pid, math.inf)
        held_before_s = -1.0
        while job.total_held_s() != held_before_s:
            held_before_s = job.total_held_s()
            await silence.lasts()

    def _charge(self, job: _Job, reply: WorkerReply, alive: bool) -> None:
        if alive:
            self._accounts.charge(job.tenant, reply.processor_s - _PATIENCE_S)
        elif job.done.cancelled():
            self._accounts.charge(job.tenant, job.used_s)
        else:
            self._accounts.charge(job.tenant, _OVERRUN_CHARGE_S)
        self._num_charges += 1
        if self._num_charges % _PRUNE_EVERY == 0:
            self._accounts.prune()

    def _overrun(self, job: _Job, cause: str) -> WorkerReply:
        if not job.done.done():
            self.num_overruns[cause] += 1
        if cause == "time":
            message = f"{job.what} takes longer than the limit of {job.limit_s:g} s; {job.advice}"
        else:
            message = (
                f"{job.what} needs more memory than the limit of {self._config.memory_limit_bytes} bytes, or "
                f"something is nested too deeply; {job.advice}"
            )
            if job.reason is Reason.REQUEST_TOO_LARGE:
                fits = self._config.memory_limit_bytes // _BYTES_PER_TEXT_BYTE
                message += f". One text of up to about {fits} bytes fits, several have more room"
        refused = WorkRefusal(message=message, field=job.field, overrun=cause, reason=job.reason)
        return WorkerReply(refused=refused)

    async def _new(self, *, lowest: bool = False) -> Worker:
        worker = await self._fork_server.worker(lowest=lowest)
        self._workers.add(worker)
        return worker

    def _kill(self, worker: Worker) -> None:
        self._workers.discard(worker)
        worker.kill()

    def _finished(self, task: asyncio.Task[None]) -> None:
        job = self._tasks.pop(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("a worker could not be replaced", exc_info=error)
            if not job.done.done():
                job.done.set_exception(
                    MillraceError(
                        Reason.TOKENIZER_UNAVAILABLE, "no worker could be started", retry_after_s=1.0
                    )
                )
