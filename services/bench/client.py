"""A streaming HTTP/1.1 client that costs little, so that the load generator does not measure itself.

One connection carries one request at a time and is kept for the next. Server-sent events are counted and
timed as they arrive (`events`).
"""

from __future__ import annotations

import asyncio
import ssl
import time
from urllib.parse import urlsplit

import httptools
import msgspec

from runtime.addresses import join
from runtime.errors import ConfigError
from services.bench.events import EventStream
from services.bench.records import RequestRecord
from services.bench.workload import PlannedRequest

# A request may take so long, in seconds: a server that hangs would hold the run for good.
REQUEST_LIMIT_S = 600.0
# A server lists its models within this time, in seconds.
_LIST_LIMIT_S = 30.0


def _is_visible(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


class BenchTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go."""

    host: str
    port: int
    tls: bool
    base_path: str
    api_key: str

    @classmethod
    def parse(cls, url: str, api_key: str) -> BenchTarget:
        """From `http://host:port[/base]`; raises ConfigError for anything else, and for a key that no header
        can carry.
        """
        try:
            parts = urlsplit(url)
            usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable or not _is_visible(url):
            raise ConfigError(f"url {url!r}: expected http://host:port or https://host:port")
        if parts.query or parts.fragment or parts.username is not None:
            raise ConfigError(
                "url: names, passwords, queries and fragments are not sent; give http://host:port/path, "
                "and the API key with --key"
            )
        if api_key and not _is_visible(api_key):
            raise ConfigError("API key: expected visible ASCII characters; give another with --key")
        tls = parts.scheme == "https"
        return cls(
            host=str(parts.hostname),
            port=parts.port or (443 if tls else 80),
            tls=tls,
            base_path=parts.path.rstrip("/").removesuffix("/v1"),
            api_key=api_key,
        )

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        return f"{'https' if self.tls else 'http'}://{join(self.host, self.port)}"

    def head(self, method: str, path: str, length: int) -> bytes:
        """Request line and headers."""
        lines = [
            f"{method} {self.base_path}{path} HTTP/1.1",
            f"host: {join(self.host, self.port)}",
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
        # The body of a refusal; events of an answer.
        self._refusal = b""
        self._events = EventStream()
        self._parser = httptools.HttpResponseParser(self)
        # Whether anything of the present response has come.
        self.answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._finished is None or self._finished.done():
            return
        if self._events.is_done or self._refusal:
            # A body without a length ends with the connection.
            self._end_refusal()
            self._finished.set_result(None)
        else:
            self._finished.set_exception(ConnectionError(str(exc or "the server closed the connection")))

    async def send(self, request: bytes, record: RequestRecord) -> None:
        """Sends one request and returns when its response is complete; fills `record`."""
        assert self.transport is not None
        self._record, self._refusal, self._events = record, b"", EventStream()
        self.answered = False
        self._finished = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self.transport.write(request)
        try:
            await self._finished
        finally:
            record.end_s = time.perf_counter()
            self._finished = None
        if record.status == 200:
            self._count_chunks(self._events.finish())
            record.read_events(self._events)

    def data_received(self, data: bytes) -> None:
        if self._finished is None or self._finished.done():
            # Not an answer to us: servers say so (408) when they give up an idle connection.
            self.close()
            return
        self.answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.closed = True
            if not self._finished.done():
                self._finished.set_exception(ConnectionError(f"not HTTP: {error}"))

    def close(self) -> None:
        """Hangs up."""
        self.closed = True
        if self.transport is not None:
            self.transport.close()

    def on_status(self, _status: bytes) -> None:
        assert self._record is not None
        self._record.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        assert self._record is not None
        if self._record.status == 200:
            self._count_chunks(self._events.feed(body))
        else:
            self._refusal += body

    def _count_chunks(self, count: int) -> None:
        assert self._record is not None
        if count:
            self._record.chunk_times_s.extend([time.perf_counter()] * count)

    def on_message_complete(self) -> None:
        assert self._record is not None
        if not self._parser.should_keep_alive():
            self.closed = True
        self._end_refusal()
        if self._finished is not None and not self._finished.done():
            self._finished.set_result(None)

    def _end_refusal(self) -> None:
        assert self._record is not None
        if self._record.status != 200:
            self._record.error = self._refusal.decode(errors="replace")[:500] or f"HTTP {self._record.status}"


class Client:
    """A pool of connections to one target. What has not ended after `limit_s` seconds has failed."""

    def __init__(self, target: BenchTarget, *, limit_s: float = REQUEST_LIMIT_S) -> None:
        self._target = target
        self._limit_s = limit_s
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if target.tls else None

    async def run(self, request: PlannedRequest) -> RequestRecord:
        """Sends the request and reads the whole stream. Failures end up in the record."""
        record = RequestRecord(index=request.index, tier=request.tier, prompt_tokens=request.prompt_tokens)
        head = self._target.head("POST", request.path, len(request.body))
        # A user waits for the connection as well.
        record.start_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                connection = await self._send(head + request.body, record)
        except OSError as error:
            if limit.expired():
                record.error = f"not ended after {self._limit_s:g} s (--request-limit)"
                return record
            record.error = f"{type(error).__name__}: {error}"
            return record
        self._idle.append(connection)
        return record

    async def _send(self, request: bytes, record: RequestRecord) -> _Connection:
        """Sends on a connection that is kept, or on a new one when the server has closed that meanwhile."""
        while True:
            connection, is_new = await self._acquire()
            try:
                await connection.send(request, record)
            except OSError:
                connection.close()
                if is_new or connection.answered:
                    raise
                continue
            except asyncio.CancelledError:
                connection.close()
                raise
            return connection

    async def models(self) -> list[str]:
        """Ids that the server lists; raises ConfigError when it cannot be asked."""
        # Not at the top: every command of the command line loads this module.
        import httpx

        target = self._target
        headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        try:
            async with httpx.AsyncClient(
                verify=self._tls or False, timeout=_LIST_LIMIT_S, trust_env=False
            ) as client:
                answer = await client.get(f"{target.origin}{target.base_path}/v1/models", headers=headers)
        except httpx.HTTPError as error:
            raise ConfigError(_why_not_reached(target, error)) from error
        try:
            return [str(model["id"]) for model in answer.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"GET /v1/models answered HTTP {answer.status_code}; check the url and the API key"
            ) from error

    async def close(self) -> None:
        """Closes the idle connections."""
        for connection in self._idle:
            connection.close()

    async def _acquire(self) -> tuple[_Connection, bool]:
        """A connection, and whether it is new."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection, False
        _, protocol = await asyncio.get_running_loop().create_connection(
            _Connection, self._target.host, self._target.port, ssl=self._tls
        )
        return protocol, True


def _why_not_reached(target: BenchTarget, error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"{target.host}:{target.port}: {cause.verify_message}; name the file of its authority with "
                "the environment variable SSL_CERT_FILE"
            )
        cause = cause.__cause__ or cause.__context__
    return f"cannot reach {target.host}:{target.port}: {error}; is the server running?"
