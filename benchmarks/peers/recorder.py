"""A relay between a client and a server that notes at the socket when a request came and each token went.

It runs in a process of its own and takes no client's word for anything, so that what a client reports can be
held against what it was sent in the same run. Both directions are passed on as they are, at once; what passes
is read afterwards. Of one connection one request is under way at a time (HTTP/1.1 without pipelining).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop

from services.bench.events import EventStream
from services.bench.records import RequestRecord

_REQUEST = b"POST /v1/completions"
_HTTP_OK = 200


class Recorder:
    """The relay, as its user sees it. `url` stands for the server's."""

    def __init__(self, url: str, pipe: Connection) -> None:
        self.url = url
        self._pipe = pipe

    def take(self) -> list[RequestRecord]:
        """Requests that were answered since the last call, in the order of their starts."""
        self._pipe.send_bytes(b"take")
        records = msgspec.msgpack.decode(self._pipe.recv_bytes(), type=list[RequestRecord])
        return sorted(records, key=lambda record: record.start_s)


@contextmanager
def recorder(server_url: str) -> Iterator[Recorder]:
    """A relay to the server at `server_url`, from start to end."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    parts = urlsplit(server_url)
    process = spawning.Process(target=_run, args=(parts.hostname, parts.port, theirs), daemon=True)
    process.start()
    try:
        yield Recorder(f"http://127.0.0.1:{int(ours.recv_bytes())}", ours)
    finally:
        process.terminate()
        process.join()


def _run(host: str, port: int, pipe: Connection) -> None:
    uvloop.run(_relay(host, port, pipe))


async def _relay(host: str, port: int, pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    records: list[RequestRecord] = []

    def hand_over() -> None:
        pipe.recv_bytes()
        pipe.send_bytes(msgspec.msgpack.encode(records))
        records.clear()

    server = await loop.create_server(lambda: _ClientSide(host, port, records), "127.0.0.1", 0)
    loop.add_reader(pipe.fileno(), hand_over)
    pipe.send_bytes(str(server.sockets[0].getsockname()[1]).encode())
    await server.serve_forever()


class _ClientSide(asyncio.Protocol):
    """A client's connection; opens one to the server for it."""

    def __init__(self, host: str, port: int, records: list[RequestRecord]) -> None:
        self._address = host, port
        self._records = records
        self._server: asyncio.Transport | None = None
        self._early: list[bytes] = []
        self.transport: asyncio.Transport
        self.answer: _Answer | None = None
        self._opening: asyncio.Task[None]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no asyncio.Transport by class.
        self.transport = cast(asyncio.Transport, transport)
        self._opening = asyncio.create_task(self._open())

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._server, _ = await loop.create_connection(lambda: _ServerSide(self), *self._address)
        except OSError:
            self.transport.close()
            return
        self._server.writelines(self._early)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._server is None:
            self._early.append(data)
        else:
            self._server.write(data)
        if self.answer is None and data.startswith(_REQUEST):
            self.answer = _Answer(now)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._server is not None:
            self._server.close()

    def ended(self, record: RequestRecord) -> None:
        """An answer is complete."""
        self._records.append(record)
        self.answer = None


class _ServerSide(asyncio.Protocol):
    """The connection to the server that belongs to one of a client."""

    def __init__(self, client: _ClientSide) -> None:
        self._client = client

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._client.transport.write(data)
        answer = self._client.answer
        if answer is not None and answer.ends_with(data, now):
            self._client.ended(answer.record)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.transport.close()


class _Answer:
    """What passes of one answer, read as the load generator reads it."""

    def __init__(self, now: float) -> None:
        self.record = RequestRecord(index=0, tier="", prompt_tokens=0, start_s=now)
        self._events = EventStream()
        self._parser = httptools.HttpResponseParser(self)
        self._now = now
        self._is_whole = False

    def ends_with(self, data: bytes, now: float) -> bool:
        """Reads a piece that came at `now`; whether it was the last one."""
        self._now = now
        self._parser.feed_data(data)
        return self._is_whole

    def on_status(self, _status: bytes) -> None:
        """See httptools."""
        self.record.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        if self.record.status == _HTTP_OK:
            self.record.chunk_times_s.extend([self._now] * self._events.feed(body))

    def on_message_complete(self) -> None:
        """See httptools."""
        self.record.end_s = self._now
        if self.record.status == _HTTP_OK:
            self.record.read_events(self._events)
        self._is_whole = True
