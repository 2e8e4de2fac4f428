"""One child process: its own session, its own log file, and death together with the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

# prctl(2): signal for this process when its parent ends.
_PR_SET_PDEATHSIG = 1
# A process that was told to end, and does not, is killed this long after its drain limit.
KILL_MARGIN_S = 5.0
# Of telling the kernel that a process gives way.
_GIVE_WAY_TRIES, _GIVE_WAY_PAUSE_S = 20, 0.06
# Time for the last lines of a process that has ended.
_LAST_OUTPUT_S = 0.2
_CHUNK_BYTES = 64 * 1024
# Longest part of a log that is shown.
_TAIL_BYTES = 16 * 1024


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """What to run and how to know that it is ready."""

    # Unique, for example "engine-0"; also the name of the log file.
    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    # Address whose grpc.health.v1 must say SERVING; empty for none.
    health: str = ""
    # Whether that address speaks without TLS even where services use it among themselves.
    is_plain: bool = False
    # URL that must answer 200; empty for none.
    health_url: str = ""
    # Whether it says `ready <name> key=value ...` on standard output.
    says_ready: bool = True
    # Time that it may take to end after SIGTERM.
    drain_limit_s: float = 30.0
    # Scheduled so that it does not interrupt others when it is woken (SCHED_BATCH).
    is_batch: bool = False
    # How far it gives way to the other processes where processors are short, as nice(1) counts.
    niceness: int = 0


class _LoadingLine(msgspec.Struct):
    """A line of a service's log that tells about a long load. Other lines have no stage."""

    stage: str = ""
    fraction: float = 0.0


class ProcessEnded(Exception):
    """A process ended while it was expected to run."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} ended with {describe_code(code)}")
        self.name = name
        self.code = code


def describe_code(code: int) -> str:
    """An exit status as people say it."""
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit status {code}"


class ChildProcess:
    """A child that can be started again under the same name, addresses and log."""

    def __init__(self, spec: ProcessSpec, log_path: Path, environment: Mapping[str, str]) -> None:
        """`environment` is added to this process's own."""
        self.spec = spec
        self._environment = environment
        self.log_path = log_path
        self.started_s = 0.0
        self._num_dropped_bytes = 0
        self._process: asyncio.subprocess.Process | None = None
        self._ready: asyncio.Future[dict[str, str]] | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Process id, or 0 before the first start."""
        return self._process.pid if self._process else 0

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def age_s(self) -> float:
        """Seconds since the last start."""
        return time.monotonic() - self.started_s

    async def start(self) -> None:
        """Starts the process; its error output goes to the log."""
        self.started_s = time.monotonic()
        self._ready = asyncio.get_running_loop().create_future()
        # Not asyncio's own pipe: with that one, the end of a process is not told while a grandchild holds it.
        output, input_of_child = os.pipe()
        try:
            with self.log_path.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self.spec.argv,
                    env={**os.environ, **self._environment},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=input_of_child,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=die_with_parent(
                        signal.SIGKILL, is_batch=self.spec.is_batch, niceness=self.spec.niceness
                    ),
                )
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(input_of_child)
        self._reader = asyncio.create_task(self._read_output(output, self._ready))
        if self.spec.niceness:
            await _session_gives_way(self._process.pid, self.spec.niceness)

    async def _read_output(self, output: int, ready: asyncio.Future[dict[str, str]]) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(output, "rb", buffering=0)
        )
        try:
            pending = b""
            while data := await reader.read(_CHUNK_BYTES):
                self._append(data)
                if not ready.done():
                    *lines, pending = (pending + data).split(b"\n")
                    _look_for_ready(lines, ready)
        finally:
            transport.close()

    def _append(self, data: bytes) -> None:
        """Adds to the log. What a full disk does not take is dropped, and told when there is room."""
        if self._num_dropped_bytes:
            data = b"(no room for %d bytes of output)\n%b" % (self._num_dropped_bytes, data)
        try:
            with self.log_path.open("ab", buffering=0) as log:
                log.write(data)
            self._num_dropped_bytes = 0
        except OSError:
            self._num_dropped_bytes += len(data)

    async def wait_ready_line(self) -> dict[str, str]:
        """What the `ready` line says, addresses among it; raises ProcessEnded when the process ends first."""
        assert self._ready is not None
        ended = asyncio.create_task(self.wait())
        # A future of the instance is shielded: the caller's time limit must not cancel it.
        said = asyncio.ensure_future(asyncio.shield(self._ready))
        waits: set[asyncio.Future[Any]] = {said, ended}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self._ready.done():
                return self._ready.result()
            raise ProcessEnded(self.spec.name, ended.result())
        finally:
            for each in waits:
                each.cancel()

    async def wait(self) -> int:
        """The exit status, once the process has ended and its output was read."""
        assert self._process is not None
        code = await self._process.wait()
        if self._reader is not None:
            # The last output is still to be read; not for long, as a grandchild may keep the pipe open.
            await asyncio.wait({self._reader}, timeout=_LAST_OUTPUT_S)
        return code

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL for the whole group when the drain limit has passed."""
        if self.running:
            assert self._process is not None
            self._process.terminate()
            try:
                async with asyncio.timeout(self.spec.drain_limit_s + KILL_MARGIN_S):
                    await self._process.wait()
            except TimeoutError:
                self.kill()
                await self._process.wait()
        self.kill()

    def kill(self) -> None:
        """Kills whatever is left of the process and its children, at once."""
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                return

    async def wait_killed(self) -> None:
        """Returns when the process is gone that was killed: the loop may not end before it has heard of that.

        One that the kernel holds fast is not waited for longer than the margin.
        """
        if self.running:
            assert self._process is not None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_MARGIN_S):
                    await self._process.wait()

    def log_tail(self, lines: int = 15) -> str:
        """Last lines of the log."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def loading_stage(self) -> tuple[str, float]:
        """What the process is loading and how much of it is done, 0 to 1; "" when it does not say."""
        try:
            line = msgspec.json.decode(self.log_tail(1).encode(), type=_LoadingLine)
        except msgspec.DecodeError:
            return "", 0.0
        return line.stage, line.fraction


def _look_for_ready(lines: list[bytes], ready: asyncio.Future[dict[str, str]]) -> None:
    for line in lines:
        words = line.decode(errors="replace").split()
        if words[:1] == ["ready"] and not ready.done():
            ready.set_result(dict(word.split("=", 1) for word in words if "=" in word))


def die_with_parent(
    last: signal.Signals, *, is_batch: bool = False, niceness: int = 0
) -> Callable[[], None] | None:
    """What a child does before it runs (preexec_fn): asks the kernel to be sent `last` when its parent ends,
    and to be scheduled as SCHED_BATCH, threads and children included, where it `is_batch`, and by its
    `niceness`.

    Without it a supervisor that is killed with SIGKILL leaves the stack behind, and a killed test the
    supervisor.
    """
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, last, 0, 0, 0)
        if os.getppid() != parent:
            # The parent ended before the kernel was asked.
            os._exit(1)
        if is_batch:
            # A sandbox may forbid it, and nothing depends on it.
            with contextlib.suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        if niceness:
            with contextlib.suppress(OSError):
                os.nice(niceness)

    return prepare


def _tell_session(pid: int, niceness: int) -> None:
    Path(f"/proc/{pid}/autogroup").write_text(str(niceness))


async def _session_gives_way(pid: int, niceness: int) -> None:
    """Where the kernel shares processors among sessions first (autogroups, sched(7)), a process's own gives
    way to the others. The kernel takes one such word in a tenth of a second from all who are not root.
    """
    for _ in range(_GIVE_WAY_TRIES):
        try:
            _tell_session(pid, niceness)
        except BlockingIOError:
            await asyncio.sleep(_GIVE_WAY_PAUSE_S)
        except OSError:
            # There are none, or a sandbox forbids it, and nothing depends on it.
            return
        else:
            return
