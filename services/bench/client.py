"""A streaming HTTP/1.1 client that costs little, so that the load generator does not measure itself.

One connection carries one request at a time and is kept for the next. Server-sent events are counted and
timed as they arrive; only the last ones are decoded, for usage and errors.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from urllib.parse import urlsplit

import httptools
import msgspec

from services.bench.records import RequestRecord
from services.bench.workload import PlannedRequest
from services.errors import ConfigError

_DATA = b"data: "
_DONE = b"[DONE]"


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go."""

    host: str
    port: int
    tls: bool
    base_path: str
    api_key: str

    @classmethod
    def parse(cls, url: str, api_key: str) -> Target:
        """From `http://host:port[/base]`; raises ConfigError for anything else."""
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ConfigError(f"url {url!r}: expected http://host:port or https://host:port")
        tls = parts.scheme == "https"
        return cls(
            host=parts.hostname,
            port=parts.port or (443 if tls else 80),
            tls=tls,
            base_path=parts.path.rstrip("/").removesuffix("/v1"),
            api_key=api_key,
        )

    def head(self, method: str, path: str, length: int) -> bytes:
        """Request line and headers."""
        lines = [
            f"{method} {self.base_path}{path} HTTP/1.1",
            f"host: {self.host}:{self.port}",
            "content-type: application/json",
            f"content-length: {length}",
        ]
        if self.api_key:
            lines.append(f"authorization: Bearer {self.api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


class _Connection(asyncio.Protocol):
    """Parses one response at a time and stamps every event."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self._record: RequestRecord | None = None
        self._finished: asyncio.Future[None] | None = None
        self._pending = b""
        self._last_events: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)
        # Whether anything of the present response has come.
        self.answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._finished is not None and not self._finished.done():
            self._finished.set_exception(ConnectionError(str(exc or "the server closed the connection")))

    async def send(self, request: bytes, record: RequestRecord) -> None:
        """Sends one request and returns when its response is complete; fills `record`."""
        assert self.transport is not None
        self._record, self._pending, self._last_events = record, b"", []
        self.answered = False
        self._finished = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        record.start_s = time.perf_counter()
        self.transport.write(request)
        try:
            await self._finished
        finally:
            record.end_s = time.perf_counter()
            self._finished = None
        record.read_events(self._last_events)

    def data_received(self, data: bytes) -> None:
        self.answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if self._finished is not None and not self._finished.done():
                self._finished.set_exception(ConnectionError(f"not HTTP: {error}"))

    def on_status(self, _status: bytes) -> None:
        assert self._record is not None
        self._record.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        record = self._record
        assert record is not None
        if record.status != 200:
            self._pending += body
            return
        now = time.perf_counter()
        *events, self._pending = (self._pending + body).split(b"\n\n")
        for event in events:
            if not event.startswith(_DATA):
                continue
            payload = event[len(_DATA) :]
            if payload == _DONE:
                continue
            self._last_events = [*self._last_events[-2:], payload]
            if _carries_text(payload):
                record.chunk_times_s.append(now)

    def on_message_complete(self) -> None:
        assert self._record is not None
        if not self._parser.should_keep_alive():
            self.closed = True
        if self._record.status != 200:
            self._record.error = self._pending.decode(errors="replace")[:500] or f"HTTP {self._record.status}"
        if self._finished is not None and not self._finished.done():
            self._finished.set_result(None)


def _carries_text(payload: bytes) -> bool:
    """Whether a chunk holds output: not the opening role, not the closing usage."""
    if b'"choices":[]' in payload or b'"choices": []' in payload:
        return False
    return b'"content":' in payload or b'"text":' in payload


class Client:
    """A pool of connections to one target."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if target.tls else None

    async def run(self, request: PlannedRequest) -> RequestRecord:
        """Sends the request and reads the whole stream. Failures end up in the record."""
        record = RequestRecord(index=request.index, tier=request.tier, prompt_tokens=request.prompt_tokens)
        head = self._target.head("POST", request.path, len(request.body))
        try:
            connection = await self._send(head + request.body, record)
        except OSError as error:
            record.error = f"{type(error).__name__}: {error}"
            return record
        self._idle.append(connection)
        return record

    async def _send(self, request: bytes, record: RequestRecord) -> _Connection:
        """Sends on a connection that is kept, or on a new one when the server has closed that meanwhile."""
        while True:
            connection, is_new = await self._take()
            try:
                await connection.send(request, record)
            except OSError:
                if is_new or connection.answered:
                    raise
                continue
            return connection

    async def models(self) -> list[str]:
        """Ids that the server lists; raises ConfigError when it cannot be asked."""
        try:
            reader, writer = await asyncio.open_connection(
                self._target.host, self._target.port, ssl=self._tls
            )
        except OSError as error:
            raise ConfigError(
                f"cannot reach {self._target.host}:{self._target.port}: {error}; is the server running?"
            ) from error
        head = self._target.head("GET", "/v1/models", 0).replace(
            b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"
        )
        writer.write(head)
        answer = await reader.read()
        writer.close()
        start, end = answer.find(b"{"), answer.rfind(b"}")
        try:
            listed = msgspec.json.decode(answer[start : end + 1])
            return [str(model["id"]) for model in listed["data"]]
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            status = answer.split(b"\r\n", 1)[0].decode(errors="replace")
            raise ConfigError(f"GET /v1/models answered {status}; check the url and the API key") from error

    async def close(self) -> None:
        """Closes the idle connections."""
        for connection in self._idle:
            if connection.transport is not None:
                connection.transport.close()

    async def _take(self) -> tuple[_Connection, bool]:
        """A connection, and whether it is new."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection, False
        _, protocol = await asyncio.get_running_loop().create_connection(
            _Connection, self._target.host, self._target.port, ssl=self._tls
        )
        return protocol, True
