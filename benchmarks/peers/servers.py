"""Starts servers, waits until they answer, and reads what they use."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from services.supervisor.ports import free_ports

START_LIMIT_S = 600.0
HTTP_OK = 200


class ServerFailed(SystemExit):
    """A server cannot be had, or has ended; what else is measured can go on without it."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a server is started on a port."""

    command: Sequence[str]
    variables: Mapping[str, str]
    health_path: str = "/health"


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that answers."""

    name: str
    url: str
    api_key: str
    model: str
    pid: int
    start_s: float
    # Where an engine of ours says what its steps took; empty for peers.
    metrics_url: str = ""

    def rss_bytes(self) -> int:
        """Resident memory of the process and its children, shared pages counted once.

        Raises ServerFailed when the process has ended.
        """
        try:
            family = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            raise ServerFailed(f"{self.name} has ended") from None
        return sum(_proportional_bytes(process) for process in family)


@contextmanager
def serve(name: str, launch: Callable[[int], Launch], log: Path) -> Iterator[Server]:
    """A server without API keys, from start to end; its output goes to `log`."""
    (port,) = free_ports(1, "127.0.0.1")
    how = launch(port)
    url = f"http://127.0.0.1:{port}"
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(how.command),
            env={**os.environ, **how.variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while not _healthy(url + how.health_path):
            if process.poll() is not None or time.monotonic() - began > START_LIMIT_S:
                raise ServerFailed(f"{name} did not start; its output is in {log}")
            time.sleep(0.05)
        yield Server(
            name=name, url=url, api_key="", model="", pid=process.pid, start_s=time.monotonic() - began
        )
    finally:
        stop(process)
        # What a server that ended by itself has left running.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a server with everything that it started."""
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
    _, alive = psutil.wait_procs(children, timeout=10)
    for child in alive:
        child.kill()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == HTTP_OK)
    except (urllib.error.URLError, OSError):
        return False


def _proportional_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0
