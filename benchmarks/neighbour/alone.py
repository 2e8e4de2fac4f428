"""How long one large request stops the gateway's loop, and everybody with it: 50 ms at most, is the aim.

The gateway itself, not the edge, is asked for its health every 5 ms over one connection that is kept. What
is told is how long after its moment each answer was there, also of those moments that came while an answer
was waited for: in a window in which nothing else is asked for, and from a large request's first byte to the
end of its answer.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.neighbour.attacks import drive_once
from benchmarks.neighbour.requests import Target
from benchmarks.tokenizer_isolation import quantile, steal_ms

AIM_MS = 50.0
NAMES = (
    "n = 128 with log-probabilities",
    "n = 128 with its tokens' log-probabilities",
    "detokenize of 8 million ids",
    "tokenize of 400,000 messages",
    "500,000 messages",
    "300,000 parts",
    "a prompt of 3 million ids",
    "14 MB of chat_template_kwargs",
    "14 MB of documents",
    "700,000 entries of metadata",
    "100,000 tool calls",
    "a million choices",
)
TABLE = """| one request | max late, ms | p99, ms | idle: max | idle: p99 | seconds | polls | its answer |
|---|---|---|---|---|---|---|---|"""
_EVERY_S = 0.005
# Of the idle window, and of what is looked at after an answer: what is freed may stop the loop as well.
_IDLE_S, _AFTER_S = 2.0, 0.5
# In which the request has to be answered; then its connection is closed.
_LIMIT_S = 150.0
_ASKED = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


class _Poller:
    """One connection to the gateway's own port."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60.0)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = self._socket.makefile("rb")

    def close(self) -> None:
        self._reader.close()
        self._socket.close()

    def watch(self, goes_on: Callable[[], bool]) -> list[float]:
        """Lateness by moment, in milliseconds."""
        late_ms, due_s = [], time.perf_counter()
        while goes_on():
            if (wait_s := due_s - time.perf_counter()) > 0:
                time.sleep(wait_s)
            self._ask()
            late_ms.append((time.perf_counter() - due_s) * 1e3)
            due_s += _EVERY_S
        return late_ms

    def _ask(self) -> None:
        self._socket.sendall(_ASKED)
        if b" 200 " not in self._reader.readline():
            raise SystemExit("the gateway is not healthy, or has ended")
        length = 0
        while (line := self._reader.readline().strip()) != b"":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        self._reader.read(length)


@contextmanager
def _polling(address: str) -> Iterator[_Poller]:
    poller = _Poller(address)
    try:
        yield poller
    finally:
        poller.close()


def _for(seconds: float) -> Callable[[], bool]:
    until_s = time.perf_counter() + seconds
    return lambda: time.perf_counter() < until_s


def _summary(late_ms: list[float]) -> dict[str, float]:
    return {
        "polls": len(late_ms),
        "max_ms": round(max(late_ms), 1),
        "p99_ms": round(quantile(late_ms, 0.99), 1),
    }


def measure(address: str, target: Target, name: str) -> dict[str, Any]:
    """Lateness at the gateway's `address` before one large request to the edge, and during it."""
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    process = processes.Process(target=drive_once, args=(name, target, _LIMIT_S, theirs))
    process.start()
    theirs.close()
    try:
        ours.recv()
        with _polling(address) as poller:
            idle = poller.watch(_for(_IDLE_S))
            ours.send("go")
            stolen_ms, began_s = -steal_ms(), time.perf_counter()
            late_ms = poller.watch(lambda: not ours.poll())
            seconds = time.perf_counter() - began_s
            outcomes = ours.recv()
            late_ms += poller.watch(_for(_AFTER_S))
            stolen_ms += steal_ms()
    finally:
        process.kill()
        process.join()
    return {
        "request": name,
        "seconds": round(seconds, 2),
        "idle": _summary(idle),
        "during": _summary(late_ms),
        "outcomes": outcomes or {"no answer": 1},
        "steal_ms": round(stolen_ms, 1),
    }


def row(found: dict[str, Any]) -> str:
    """A line of TABLE."""
    during, idle = found["during"], found["idle"]
    cells = [found["request"]]
    cells += [f"{each:.1f}" for of in (during, idle) for each in (of["max_ms"], of["p99_ms"])]
    cells += [f"{found['seconds']:.1f}", str(during["polls"]), ", ".join(found["outcomes"])]
    return "| " + " | ".join(cells) + " |"
