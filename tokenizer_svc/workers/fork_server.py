"""Worker processes as copies of one that has loaded the vocabulary: a new one costs milliseconds.

Workers are killed all the time when somebody sends hostile grammars. Starting each anew would load Python,
the libraries and the vocabulary again, half a second of processor time at everybody's expense; a copy of a
process that has done so shares its memory as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time

from contract.frames import HEADER_BYTES, framed, header, message_bytes
from tokenizer_svc.grammar.request import WorkerSetup
from tokenizer_svc.workers.worker import LOWEST, NICENESS, ORDINARY, READY

# The first process has this long to load the vocabulary.
_START_LIMIT_S = 60.0
# It does nothing but copy itself, which takes milliseconds: after so long it hangs, and is replaced.
_COPY_LIMIT_S = 5.0
# Linux: of all threads, as the scheduler counts (CPUCLOCK_SCHED).
_CPU_CLOCK = 2

# A request to a worker, in parts that are sent without being copied.
Payload = tuple[bytes | memoryview, ...]


class Replies(asyncio.BufferedProtocol):
    """A worker's replies, one at a time, read to where they stay: nobody is woken until one is whole."""

    def __init__(self) -> None:
        self._header = bytearray(HEADER_BYTES)
        self._reply: bytearray | None = None
        self._num_read = 0
        self._waiter: asyncio.Future[bytearray] | None = None
        self._lost = False

    def next(self) -> asyncio.Future[bytearray]:
        """The reply that comes next; EOFError when the process died."""
        self._waiter = asyncio.get_running_loop().create_future()
        if self._lost:
            self._waiter.set_exception(EOFError("the worker died"))
        return self._waiter

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio.BufferedProtocol."""
        return memoryview(self._header if self._reply is None else self._reply)[self._num_read :]

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio.BufferedProtocol."""
        self._num_read += nbytes
        if self._reply is None and self._num_read == HEADER_BYTES:
            self._reply = bytearray(message_bytes(self._header))
            self._num_read = 0
        if self._reply is not None and self._num_read == len(self._reply):
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(self._reply)
            self._reply = None
            self._num_read = 0

    def eof_received(self) -> None:
        """See asyncio.BufferedProtocol."""

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.BufferedProtocol."""
        self._lost = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(EOFError("the worker died"))


class Worker:
    """One process. `run` either answers or leaves the process dead."""

    def __init__(
        self,
        transport: asyncio.Transport,
        replies: Replies,
        ready: asyncio.Future[bytearray],
        pid: int,
        *,
        lowest: bool,
    ) -> None:
        self._transport = transport
        self._replies = replies
        self.pid = pid
        self._ready = ready
        # That it died before is found when it is used.
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        # Names this very process, even when its number belongs to another one by then.
        self._handle = os.pidfd_open(pid)
        # The clock of its processor time, numbered as by clock_getcpuclockid(3).
        self._clock = (~pid << 3) | _CPU_CLOCK
        # Whether it gives way to everything else, or wholly so; that cannot be undone.
        self.yielding = self.lowest = lowest

    async def ready(self) -> None:
        """Until it can work, or is dead."""
        await asyncio.wait({self._ready})

    def give_way(self, *, wholly: bool = False) -> None:
        """From now on it computes when little else wants to; `wholly` only when nothing else does."""
        if self.lowest or (self.yielding and not wholly):
            return
        self.yielding = True
        self.lowest |= wholly
        policy = os.SCHED_IDLE if wholly else os.SCHED_BATCH
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.pid, NICENESS)
            os.sched_setscheduler(self.pid, policy, os.sched_param(0))

    def stop(self) -> None:
        """It does not compute until `go_on`."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Ends `stop`."""
        self._signal(signal.SIGCONT)

    def processor_s(self) -> float:
        """Processor time that it has used so far; 0 when it is gone."""
        try:
            return time.clock_gettime(self._clock)
        except OSError:
            return 0.0

    async def run(self, payload: Payload) -> bytearray:
        """The reply to one request; EOFError when the process died."""
        reply = self._replies.next()
        self._transport.writelines((header(sum(map(len, payload))), *payload))
        return await reply

    def kill(self) -> None:
        """Ends the process; again does no harm. How soon it is gone depends on its priority."""
        if self._handle < 0:
            return
        self._signal(signal.SIGKILL)
        # Not `close`, which would wait until it has read all that was written.
        self._transport.abort()
        os.close(self._handle)
        self._handle = -1

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)


class ForkServer:
    """The process that workers are copies of. Use from one event loop."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._mutex = asyncio.Lock()

    async def worker(self, *, lowest: bool = False) -> Worker:
        """A new worker, which computes when nothing else wants to if it is one of the `lowest` priority.
        Raises EOFError or TimeoutError when the vocabulary cannot be loaded.
        """
        worker = await self._worker(LOWEST if lowest else ORDINARY)
        try:
            await worker.ready()
        except BaseException:
            worker.kill()
            raise
        return worker

    async def _worker(self, kind: bytes) -> Worker:
        async with self._mutex:
            if self._control is not None:
                # Whatever ended the process that is copied, another one can be started.
                with contextlib.suppress(EOFError, OSError):
                    return await self._copy(self._control, kind)
                await self._end()
            return await self._copy(await self._start(), kind)

    async def close(self) -> None:
        """Ends the process; its copies go on."""
        async with self._mutex:
            await self._end()

    async def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tokenizer_svc.workers.worker",
                stdin=theirs.fileno(),
                # A process that runs out of memory writes more there than a log should hold.
                stderr=asyncio.subprocess.DEVNULL,
            )
        ours.setblocking(False)
        self._control = ours
        payload = self._setup.encoded()
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_START_LIMIT_S):
            await loop.sock_sendall(ours, framed(payload))
            if await self._receive(ours, len(READY)) != READY:
                raise EOFError("the worker did not become ready")
        return ours

    async def _copy(self, control: socket.socket, kind: bytes) -> Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(control, [kind], [theirs.fileno()])
            async with asyncio.timeout(_COPY_LIMIT_S):
                pid = int.from_bytes(await self._receive(control, 4), "little")
        replies = Replies()
        # Awaited before there is a connection: uvloop reads from one before it says that it is there, and a
        # worker may be ready by then.
        ready = replies.next()
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: replies, sock=ours)
        return Worker(transport, replies, ready, pid, lowest=kind == LOWEST)

    async def _receive(self, control: socket.socket, num_bytes: int) -> bytes:
        received = b""
        while len(received) < num_bytes:
            part = await asyncio.get_running_loop().sock_recv(control, num_bytes - len(received))
            if not part:
                raise EOFError("the process that workers are copies of died")
            received += part
        return received

    async def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None
