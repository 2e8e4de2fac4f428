"""The front's view of the core process: started, fed, listened to, and noticed when it dies or hangs."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from typing import cast

import msgspec

from contract.frames import FrameBuffer
from engine.core import messages
from engine.core.messages import encode
from runtime.hang import ProcessSilence

_log = logging.getLogger(__name__)

_STOP_GRACE_S = 5.0


class CoreClient:
    """Starts the core and passes its reports to `on_report`, in order, on the event loop."""

    # Sampling options that a core of this make refuses.
    unsupported_options: tuple[str, ...] = ()

    def __init__(self, start: messages.Start, *, log_level: str = "info") -> None:
        self._start = start
        self.log_level = log_level
        self._process: asyncio.subprocess.Process | None = None
        self._socket: _CoreSocket | None = None
        self._decoder = msgspec.msgpack.Decoder(messages.Report)
        self.on_report: Callable[[messages.Report], None] = lambda report: None
        # Set for good when the core has ended, with what is known of why.
        self.ended = asyncio.Event()
        self.end_cause = ""
        self._silence: ProcessSilence | None = None
        self._watcher: asyncio.Task[None] | None = None
        # Carries blocks, where engines hand them to each other.
        self.for_blocks: socket.socket | None = None

    @property
    def pid(self) -> int:
        """Process id of the core."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Spawns the process and sends it the configuration; readiness arrives as a report."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        arguments, environment = self.command(theirs.fileno())
        given = [theirs]
        if self._start.config.role != "both":
            self.for_blocks, blocks_end = socket.socketpair()
            given.append(blocks_end)
            arguments += ("--blocks-fd", str(blocks_end.fileno()))
        descriptors = [each.fileno() for each in given]
        self._process = await asyncio.create_subprocess_exec(
            *arguments, pass_fds=descriptors, stdin=asyncio.subprocess.DEVNULL, env=environment
        )
        for each in given:
            each.close()
        await self.connect(ours)

    def command(self, fd: int) -> tuple[tuple[str, ...], dict[str, str] | None]:
        """The core's command line, and its variables; None: those of this process."""
        return (sys.executable, "-m", "engine.core", "--fd", str(fd), "--log-level", self.log_level), None

    async def connect(self, ours: socket.socket) -> None:
        """Takes this side's end of the socket pair, and begins."""
        _, self._socket = await asyncio.get_running_loop().create_connection(
            lambda: _CoreSocket(self._receive), sock=ours
        )
        self.send(self._start)

    def watch(self, silence_limit_s: float, step_limit_s: float) -> None:
        """From now on a core that reports nothing is killed: after `silence_limit_s` seconds, or after
        `step_limit_s` where it computes. It reports every second, except in the middle of a step.
        """
        self._silence = ProcessSilence(silence_limit_s, self.pid, step_limit_s, waits_for_children=True)
        self._watcher = asyncio.create_task(self._kill_if_hung(self._silence))

    async def _kill_if_hung(self, silence: ProcessSilence) -> None:
        why = await silence.lasts()
        assert self._process is not None
        self.end_cause = f"it hung and was killed: {why}"
        self._process.kill()

    def send(self, command: messages.Command) -> None:
        """Queues a command; does nothing once the core has ended."""
        if self._socket is not None and not self.ended.is_set():
            self._socket.write(encode(command))

    def _receive(self, payload: bytes) -> None:
        if self._silence is not None:
            self._silence.heard()
        self.heard(self._decoder.decode(payload))

    def heard(self, report: messages.Report) -> None:
        """Passes a report of the core on."""
        self.on_report(report)

    async def listen(self) -> None:
        """Returns when the core has ended; sets `ended`. Reports are passed on as they come."""
        assert self._socket is not None
        assert self._process is not None
        await self._socket.closed
        code = await self._process.wait()
        self._leave_alone()
        self.end_cause = self.end_cause or (f"killed by signal {-code}" if code < 0 else f"exit code {code}")
        self.ended.set()

    def _leave_alone(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()

    async def stop(self) -> None:
        """Asks the core to end and waits; kills it when it does not."""
        if self._process is None or self._socket is None:
            return
        self._leave_alone()
        self.send(messages.Stop())
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_GRACE_S)
        except TimeoutError:
            _log.warning("the core did not end within %.0f s and is killed", _STOP_GRACE_S)
            self._process.kill()
            await self._process.wait()
        self._socket.close()


class _CoreSocket(asyncio.Protocol):
    """This side of the socket pair. Reports are handled where they are read: tokens wait for no task."""

    def __init__(self, on_payload: Callable[[bytes], None]) -> None:
        self._on_payload = on_payload
        self._buffer = FrameBuffer()
        self._transport: asyncio.Transport | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        for payload in self._buffer.feed(data):
            self._on_payload(payload)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        if exc is not None:
            _log.warning("the socket to the core failed: %s", exc)
        self._transport = None
        if not self.closed.done():
            self.closed.set_result(None)

    def write(self, data: bytes) -> None:
        """Sends bytes; nothing happens once the core has ended."""
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        """Ends the connection."""
        if self._transport is not None:
            self._transport.close()
