"""The HTTP server over real sockets: requests in any cut, in order, within limits, and clients that leave."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http import exchange as exchange_module
from gateway.http import server as server_module
from gateway.http.connection import Connection, JoiningTransport
from gateway.http.exchange import Exchange, Handler
from gateway.http.server import HttpServer
from services.errors import MillraceError, Reason

LIMIT = 1000


class Echo:
    """Answers with method, path and body; at /slow when `proceed` is set; /events are three events.

    /held is an event, and after `proceed` another.
    """

    def __init__(self) -> None:
        self.proceed = asyncio.Event()
        self.gone = asyncio.Event()
        self.seen: list[str] = []

    async def __call__(self, exchange: Exchange) -> None:
        self.seen.append(exchange.path)
        special: dict[str, Handler] = {
            "/slow": self._slow,
            "/events": self._events,
            "/held": self._held,
            "/breaks": self._breaks,
        }
        await special.get(exchange.path, self._echo)(exchange)

    async def _echo(self, exchange: Exchange) -> None:
        try:
            body = f"{exchange.method} {exchange.path} ".encode() + exchange.body()
            await exchange.respond(200, body)
        except MillraceError as error:
            await exchange.respond_error(error)

    async def _slow(self, exchange: Exchange) -> None:
        exchange.watch_client(self.gone.set)
        await self.proceed.wait()
        await self._echo(exchange)

    async def _events(self, exchange: Exchange) -> None:
        await exchange.begin_events()
        for number in range(3):
            await exchange.write(b"data: %d\n\n" % number)
        await exchange.end_events(b"data: [DONE]\n\n")

    async def _held(self, exchange: Exchange) -> None:
        await exchange.begin_events()
        await exchange.write(b"data: 0\n\n")
        await self.proceed.wait()
        await exchange.end_events(b"data: [DONE]\n\n")

    async def _breaks(self, exchange: Exchange) -> None:
        await exchange.begin_events()
        await exchange.write(b"data: 0\n\n")


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[HttpServer]:
    server = HttpServer(handler, "127.0.0.1:0", max_body_bytes=LIMIT)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Echo, HttpServer]]:
    echo = Echo()
    async with serving(echo) as server:
        yield echo, server


def connections(server: HttpServer) -> list[Connection]:
    assert server._server is not None
    found = list(server._server.server_state.connections)
    assert all(isinstance(each, Connection) for each in found)
    return found  # type: ignore[return-value]


async def connect(server: HttpServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", server.port)


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """One response: status, headers, body (of chunks, joined)."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    return int(lines[0].split()[1]), headers, body


def request(path: str, body: bytes = b"", *lines: str, method: str = "POST") -> bytes:
    head = [f"{method} {path} HTTP/1.1", "Host: a", f"Content-Length: {len(body)}", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 400), max_size=8))
def test_every_cut_of_pipelined_requests_gives_the_same_answers(cuts: list[int]) -> None:
    stream = request("/a", b"one") + request("/b%20c?x=1") + request("/d", b"x" * 200, method="PUT")
    stream += (
        b"POST /e HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )

    async def run() -> list[bytes]:
        async with served() as (_, server):
            reader, writer = await connect(server)
            start = 0
            for cut in [*cuts, len(stream)]:
                writer.write(stream[start : start + cut])
                start += cut
                # The server reads this piece before the next is there.
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            bodies = [(await answer(reader))[2] for _ in range(4)]
            writer.close()
            return bodies

    bodies = asyncio.run(run())
    assert bodies == [b"POST /a one", b"POST /b c ", b"PUT /d " + b"x" * 200, b"POST /e abcde"]


async def test_answers_come_in_order_and_one_at_a_time() -> None:
    async with served() as (echo, server):
        reader, writer = await connect(server)
        writer.write(request("/slow", b"1") + request("/fast", b"2"))
        while not echo.seen:
            await asyncio.sleep(0.001)
        assert echo.seen == ["/slow"]
        echo.proceed.set()
        assert (await answer(reader))[2] == b"POST /slow 1"
        assert (await answer(reader))[2] == b"POST /fast 2"
        writer.close()


async def test_events_come_as_chunks_and_the_connection_stays() -> None:
    async with served() as (_, server):
        reader, writer = await connect(server)
        for _ in range(2):
            writer.write(request("/events"))
            status, headers, body = await answer(reader)
            assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
            assert body == b"data: 0\n\ndata: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
        writer.close()


async def test_http_1_0_gets_events_without_chunks() -> None:
    async with served() as (_, server):
        reader, writer = await connect(server)
        writer.write(b"GET /events HTTP/1.0\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert body == b"data: 0\n\ndata: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
        writer.close()


@pytest.mark.parametrize("declared", [True, False])
async def test_body_beyond_the_limit_is_refused_and_the_answer_is_readable(declared: bool) -> None:
    async with served() as (_, server):
        reader, writer = await connect(server)
        if declared:
            # A client that waits to be told to go on has sent nothing yet.
            writer.write(b"POST /a HTTP/1.1\r\ncontent-length: 1001\r\nexpect: 100-continue\r\n\r\n")
        else:
            writer.write(b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(5):
                writer.write(b"%x\r\n%b\r\n" % (400, b"x" * 400))
        status, headers, body = await answer(reader)
        assert (status, headers["connection"]) == (413, "close")
        assert b"limit of 1000 bytes" in body
        if not declared:
            writer.write(b"0\r\n\r\n")
        assert await reader.read() == b""
        writer.close()


async def test_rest_of_a_body_that_is_not_taken_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange_module, "_LINGER_S", 0.05)
    async with served() as (_, server):
        reader, writer = await connect(server)
        writer.write(b"POST /a HTTP/1.1\r\ncontent-length: 1001\r\n\r\n")
        assert (await answer(reader))[0] == 413
        assert await reader.read() == b""
        writer.close()


async def test_client_that_sends_far_too_much_before_it_reads_still_gets_the_answer() -> None:
    async with served() as (_, server):
        reader, writer = await connect(server)
        writer.write(b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(200):
            writer.write(b"%x\r\n%b\r\n" % (65536, b"x" * 65536))
            # A connection that was reset raises here.
            await writer.drain()
        writer.write(b"0\r\n\r\n" + request("/behind"))
        status, headers, _ = await answer(reader)
        assert (status, headers["connection"]) == (413, "close")
        assert await reader.read() == b""
        writer.close()


async def test_requests_behind_one_that_ended_the_connection_are_not_run() -> None:
    async with served() as (echo, server):
        reader, writer = await connect(server)
        writer.write(request("/large", b"x" * 1001) + request("/behind"))
        assert (await answer(reader))[0] == 413
        assert await reader.read() == b""
        assert echo.seen == ["/large"]
        writer.close()


@pytest.mark.parametrize(
    "piece", [b"x-%d: 1\r\n", b"x-%d: " + b"y" * 10_000 + b"\r\n"], ids=["many headers", "long ones"]
)
async def test_headers_without_end_are_refused(piece: bytes) -> None:
    async with served() as (echo, server):
        reader, writer = await connect(server)
        writer.write(b"GET /a HTTP/1.1\r\n")
        numbers = iter(range(10**6))
        while not reader.at_eof() and not reader._buffer:  # type: ignore[attr-defined]
            writer.write(b"".join(piece % next(numbers) for _ in range(10)))
            await asyncio.sleep(0)
        status, headers, body = await answer(reader)
        assert (status, headers["connection"]) == (413, "close")
        assert b"REQUEST_TOO_LARGE" in body
        assert echo.seen == []
        writer.close()


async def test_trailers_do_not_replace_headers() -> None:
    seen: list[dict[bytes, bytes]] = []

    async def keep(exchange: Exchange) -> None:
        seen.append(exchange.headers)
        await exchange.respond(200, b"")

    async with serving(keep) as server:
        reader, writer = await connect(server)
        # In one piece: the trailers are there before the application has seen the headers.
        writer.write(
            b"POST /a HTTP/1.1\r\nx-who: me\r\ntransfer-encoding: chunked\r\n\r\n"
            b"1\r\na\r\n0\r\nx-who: another\r\nx-more: 1\r\n\r\n"
        )
        assert (await answer(reader))[0] == 200
        assert seen[0] == {b"x-who": b"me", b"transfer-encoding": b"chunked"}
        writer.close()


async def test_trailers_without_end_are_refused() -> None:
    async with served() as (echo, server):
        reader, writer = await connect(server)
        writer.write(b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n")
        while not reader.at_eof() and not reader._buffer:  # type: ignore[attr-defined]
            writer.write(b"x-more: " + b"y" * 10_000 + b"\r\n")
            await asyncio.sleep(0)
        assert (await answer(reader))[0] == 413
        assert echo.seen == []
        writer.close()


async def test_every_reason_of_the_error_table_can_be_answered() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        raise AssertionError("there is no body to read")

    scope = {"method": "GET", "path": "/", "headers": [], "http_version": "1.1"}
    for reason in Reason:
        await Exchange(scope, receive, send, LIMIT).respond_error(MillraceError(reason, "why"))
    assert sum(b'"code":' in message.get("body", b"") for message in sent) == len(Reason)


async def test_client_that_waits_is_told_to_go_on() -> None:
    async with served() as (_, server):
        reader, writer = await connect(server)
        writer.write(b"POST /a HTTP/1.1\r\ncontent-length: 3\r\nExpect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        assert (await answer(reader))[2] == b"POST /a abc"
        writer.close()


async def test_client_that_leaves_is_noticed_while_it_is_served() -> None:
    async with served() as (echo, server):
        _, writer = await connect(server)
        writer.write(request("/slow"))
        while not echo.seen:
            await asyncio.sleep(0.001)
        writer.close()
        await asyncio.wait_for(echo.gone.wait(), 10)
        echo.proceed.set()


async def test_answer_that_breaks_off_ends_the_connection_without_its_last_chunk() -> None:
    async with served() as (_, server):
        reader, writer = await connect(server)
        writer.write(request("/breaks"))
        assert (await reader.read()).endswith(b"data: 0\n\n\r\n")
        writer.close()


@pytest.mark.parametrize(
    "garbage", [b"not http\r\n\r\n", b"GET / HTTP/1.1\r\ncontent-length: x\r\n\r\n", b"\x16\x03\x01\x02\x00"]
)
async def test_malformed_requests_get_an_openai_error_and_the_end(garbage: bytes) -> None:
    async with served() as (_, server):
        reader, writer = await connect(server)
        writer.write(garbage)
        status, headers, body = await answer(reader)
        assert (status, headers["connection"]) == (400, "close")
        assert b"MALFORMED_BODY" in body
        assert await reader.read() == b""
        writer.close()


async def test_requests_that_would_switch_protocols_are_answered_in_this_one() -> None:
    async with served() as (_, server):
        reader, writer = await connect(server)
        writer.write(request("/a", b"", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c"))
        assert (await answer(reader))[2] == b"POST /a "
        writer.close()


async def test_head_has_no_body_and_close_is_kept() -> None:
    async with served() as (_, server):
        reader, writer = await connect(server)
        writer.write(request("/a", b"", "Connection: close", method="HEAD"))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert b"content-length: 8" in head
        assert b"connection: close" in head
        assert body == b""
        writer.close()


async def test_client_that_reads_slowly_holds_back_its_own_stream_only() -> None:
    written = 0

    async def flood(exchange: Exchange) -> None:
        nonlocal written
        if exchange.path != "/flood":
            await exchange.respond(200, b"")
            return
        await exchange.begin_events()
        for _ in range(1000):
            await exchange.write(b"x" * 65536)
            written += 1
        await exchange.end_events(b"end")

    async with serving(flood) as server:
        reader, writer = await connect(server)
        writer.write(request("/flood"))
        await reader.readuntil(b"\r\n\r\n")
        before = -1
        while written != before:
            before = written
            await asyncio.sleep(0.05)
        assert written < 1000
        assert connections(server)[0].transport.get_write_buffer_size() < 4 * 65536
        other_reader, other_writer = await connect(server)
        other_writer.write(request("/other"))
        assert (await answer(other_reader))[0] == 200
        other_writer.close()
        size = 0
        while size < 1000 * 65536:
            data = await reader.read(1 << 20)
            assert data
            size += len(data)
        writer.close()


async def test_row_of_requests_that_wait_is_bounded() -> None:
    piece = b"GET /fast HTTP/1.1\r\n\r\n"
    num_waiting = 0
    proceed = asyncio.Event()

    async def count(exchange: Exchange) -> None:
        nonlocal num_waiting
        await proceed.wait()
        num_waiting = max(num_waiting, len(connections(server)[0].pipeline))
        await exchange.respond(200, b"")

    async with serving(count) as server:
        reader, writer = await connect(server)
        num_requests = 30_000
        writer.write(piece * num_requests)
        proceed.set()
        for _ in range(num_requests):
            assert (await answer(reader))[0] == 200
        writer.close()
    # The event loop reads 256 KiB at a time.
    assert num_waiting <= (256 * 1024) // len(piece) + 1


async def test_client_that_leaves_is_told_of_in_the_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    told_in_time: list[bool] = []
    over = asyncio.Event()

    def lose(connection: Connection, exc: Exception | None) -> None:
        lost(connection, exc)
        assert not echo.gone.is_set()
        asyncio.get_running_loop().call_soon(check)

    def check() -> None:
        told_in_time.append(echo.gone.is_set())
        over.set()

    lost = Connection.connection_lost
    async with served() as (echo, server):
        _, writer = await connect(server)
        writer.write(request("/slow"))
        while not echo.seen:
            await asyncio.sleep(0.001)
        with monkeypatch.context() as patched:
            patched.setattr(Connection, "connection_lost", lose)
            writer.close()
            await asyncio.wait_for(over.wait(), 10)
        assert told_in_time == [True]
        echo.proceed.set()


async def test_garbage_at_the_port_does_not_disturb_a_stream_that_runs() -> None:
    async with served() as (echo, server):
        reader, writer = await connect(server)
        writer.write(request("/held"))
        await reader.readuntil(b"data: 0\n\n\r\n")
        for garbage in (b"not http\r\n\r\n", b"\x16\x03\x01\x02\x00" * 1000, b"\x00" * 100_000):
            other_reader, other_writer = await connect(server)
            other_writer.write(garbage)
            assert (await answer(other_reader))[0] == 400
            other_writer.close()
        # One that goes without a word in the middle of a head.
        _, other_writer = await connect(server)
        other_writer.write(b"POST /a HTTP/1.1\r\ncontent-le")
        other_writer.transport.abort()
        echo.proceed.set()
        assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.write(request("/a"))
        assert (await answer(reader))[2] == b"POST /a "
        writer.close()


@pytest.mark.parametrize("path", ["/slow", "/held"])
async def test_garbage_behind_a_request_waits_for_its_answer(path: str) -> None:
    async with served() as (echo, server):
        reader, writer = await connect(server)
        writer.write(request("/a") + request(path) + b"not http\r\n\r\n")
        assert (await answer(reader))[2] == b"POST /a "
        echo.proceed.set()
        status, _, body = await answer(reader)
        assert (status, b"MALFORMED" in body) == (200, False)
        assert await reader.read() == b""
        writer.close()


async def test_headers_without_end_behind_a_request_are_not_kept() -> None:
    async with served() as (echo, server):
        reader, writer = await connect(server)
        writer.write(request("/held") + b"GET /a HTTP/1.1\r\n")
        for number in range(300):
            writer.write(b"x-%d: %b\r\n" % (number, b"y" * 10_000))
            await writer.drain()
            await asyncio.sleep(0)
        connection = connections(server)[0]
        echo.proceed.set()
        assert (await answer(reader))[0] == 200
        assert await reader.read() == b""
        assert len(connection.headers) < 100
        writer.close()


async def test_body_that_breaks_off_is_refused_and_its_request_is_not_run() -> None:
    async with served() as (echo, server):
        reader, writer = await connect(server)
        writer.write(b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\nnot a size\r\n")
        assert (await answer(reader))[0] == 400
        assert await reader.read() == b""
        assert echo.seen == []
        writer.close()


async def test_a_thousand_connections_are_kept() -> None:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, files[1]), files[1]))
    try:
        async with served() as (_, server):
            clients = [await connect(server) for _ in range(1000)]
            for _ in range(2):
                for _, writer in clients:
                    writer.write(request("/a"))
                for reader, _ in clients:
                    assert (await answer(reader))[2] == b"POST /a "
            assert len(connections(server)) == 1000
            for _, writer in clients:
                writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)


async def test_stop_closes_what_is_idle_and_lets_the_rest_end() -> None:
    echo = Echo()
    server = HttpServer(echo, "127.0.0.1:0", max_body_bytes=LIMIT)
    await server.start()
    idle_reader, idle_writer = await connect(server)
    idle_writer.write(request("/a"))
    await answer(idle_reader)
    reader, writer = await connect(server)
    writer.write(request("/slow"))
    while "/slow" not in echo.seen:
        await asyncio.sleep(0.001)
    stopping = asyncio.create_task(server.stop())
    assert await idle_reader.read() == b""
    echo.proceed.set()
    status, headers, _ = await answer(reader)
    assert (status, headers["connection"]) == (200, "close")
    await stopping
    idle_writer.close()
    writer.close()


async def test_stop_ends_what_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_FAREWELL_S", 0.05)
    begun = asyncio.Event()
    cancelled = asyncio.Event()

    async def endless(exchange: Exchange) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with serving(endless) as server:
        reader, writer = await connect(server)
        writer.write(request("/a"))
        await begun.wait()
        await server.stop()
        await asyncio.wait_for(cancelled.wait(), 10)
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


async def test_what_is_written_in_one_turn_goes_out_together() -> None:
    class Wire(asyncio.Transport):
        def __init__(self) -> None:
            super().__init__()
            self.writes: list[bytes] = []

        def write(self, data: Any) -> None:
            self.writes.append(data)

        def is_closing(self) -> bool:
            return False

    wire = Wire()
    transport = JoiningTransport(wire, asyncio.get_running_loop())
    transport.write(b"head")
    transport.write(b"body")
    assert wire.writes == []
    await asyncio.sleep(0)
    assert wire.writes == [b"headbody"]
    transport.write(b"x" * 100_000)
    assert wire.writes[1:] == [b"x" * 100_000]


def test_an_answer_is_sent_before_anything_else_is_done() -> None:
    """What a handler does after its answer (the settlement) is nothing that the client waits for."""
    seen: list[bytes] = []

    async def ask() -> None:
        loop = asyncio.get_running_loop()
        client = socket.socket()
        client.setblocking(False)

        async def handle(exchange: Exchange) -> None:
            await exchange.respond(200, b"answer")
            # In the same turn of the event loop.
            seen.append(client.recv(65536))

        async with serving(handle) as server:
            with client:
                await loop.sock_connect(client, ("127.0.0.1", server.port))
                await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                async with asyncio.timeout(5):
                    while not seen:
                        await asyncio.sleep(0.001)

    uvloop.run(ask())
    assert seen[0].startswith(b"HTTP/1.1 200 ")
    assert seen[0].endswith(b"answer")
