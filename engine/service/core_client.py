"""The front's view of the core process: started, fed, listened to, and noticed when it dies."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable

import msgspec

from engine.core import messages
from engine.core.frames import FrameBuffer, encode

_log = logging.getLogger(__name__)

_READ_BYTES = 1 << 20
_STOP_GRACE_S = 5.0


class CoreClient:
    """Starts the core and passes its reports to `on_report`, in order, on the event loop."""

    def __init__(self, start: messages.Start, *, log_level: str = "info") -> None:
        self._start = start
        self._log_level = log_level
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._decoder = msgspec.msgpack.Decoder(messages.Report)
        self.on_report: Callable[[messages.Report], None] = lambda report: None
        # Set for good when the core has ended, with what is known of why.
        self.ended = asyncio.Event()
        self.end_cause = ""

    @property
    def pid(self) -> int:
        """Process id of the core."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Spawns the process and sends it the configuration; readiness arrives as a report."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        arguments = ("-m", "engine.core", "--fd", str(theirs.fileno()), "--log-level", self._log_level)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL
        )
        theirs.close()
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self.send(self._start)

    def send(self, command: messages.Command) -> None:
        """Queues a command; does nothing once the core has ended."""
        if self._writer is not None and not self.ended.is_set():
            self._writer.write(encode(command))

    async def listen(self) -> None:
        """Passes reports on until the core ends; sets `ended`."""
        assert self._reader is not None
        buffer = FrameBuffer()
        try:
            while data := await self._reader.read(_READ_BYTES):
                for payload in buffer.feed(data):
                    self.on_report(self._decoder.decode(payload))
        except ConnectionError as error:
            _log.warning("the socket to the core failed: %s", error)
        assert self._process is not None
        code = await self._process.wait()
        self.end_cause = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        self.ended.set()

    async def stop(self) -> None:
        """Asks the core to end and waits; kills it when it does not."""
        if self._process is None or self._writer is None:
            return
        self.send(messages.Stop())
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_GRACE_S)
        except TimeoutError:
            _log.warning("the core did not end within %.0f s and is killed", _STOP_GRACE_S)
            self._process.kill()
            await self._process.wait()
        self._writer.close()
