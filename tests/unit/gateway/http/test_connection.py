"""The HTTP server by itself: requests in any cut, in order, within limits, and clients that leave."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.connection import Connection
from gateway.http.exchange import Exchange
from gateway.http.server import HttpServer
from services.errors import MillraceError, Reason

LIMIT = 1000


class Echo:
    """Answers with method, path and body; at /slow when `proceed` is set; /events are three events."""

    def __init__(self) -> None:
        self.proceed = asyncio.Event()
        self.gone = asyncio.Event()
        self.seen: list[str] = []

    def __call__(self, exchange: Exchange) -> Coroutine[Any, Any, None] | None:
        self.seen.append(exchange.path)
        if exchange.path == "/slow":
            return self._slow(exchange)
        if exchange.path == "/events":
            return self._events(exchange)
        if exchange.path == "/breaks":
            return self._breaks(exchange)
        self._echo(exchange)
        return None

    def _echo(self, exchange: Exchange) -> None:
        try:
            body = f"{exchange.method} {exchange.path} ".encode() + exchange.body()
            exchange.respond(200, body)
        except MillraceError as error:
            exchange.respond_error(error)

    async def _slow(self, exchange: Exchange) -> None:
        exchange.watch_client(self.gone.set)
        await self.proceed.wait()
        self._echo(exchange)

    async def _events(self, exchange: Exchange) -> None:
        exchange.begin_events()
        for number in range(3):
            await exchange.write(b"data: %d\n\n" % number)
        exchange.end_events(b"data: [DONE]\n\n")

    async def _breaks(self, exchange: Exchange) -> None:
        exchange.begin_events()
        await exchange.write(b"data: 0\n\n")


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Echo, HttpServer]]:
    echo = Echo()
    server = HttpServer(echo, "127.0.0.1:0", max_body_bytes=LIMIT)
    await server.start()
    try:
        yield echo, server
    finally:
        await server.stop()


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


class _Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += data

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        pass


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 400), max_size=8))
def test_every_cut_of_pipelined_requests_gives_the_same_answers(cuts: list[int]) -> None:
    stream = request("/a", b"one") + request("/b%20c?x=1") + request("/d", b"x" * 200, method="PUT")
    stream += (
        b"POST /e HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )

    async def run() -> bytes:
        wire = _Wire()
        connection = Connection(Echo(), LIMIT, set())
        connection.connection_made(wire)
        start = 0
        for cut in [*cuts, len(stream)]:
            connection.data_received(stream[start : start + cut])
            start += cut
            await asyncio.sleep(0)
        for _ in range(8):
            await asyncio.sleep(0)
        return wire.written

    written = asyncio.run(run())
    bodies = [part.partition(b"\r\n\r\n")[2] for part in written.split(b"HTTP/1.1 200 OK\r\n")[1:]]
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

    def keep(exchange: Exchange) -> None:
        seen.append(exchange.headers)
        exchange.respond(200, b"")

    server = HttpServer(keep, "127.0.0.1:0", max_body_bytes=LIMIT)
    await server.start()
    reader, writer = await connect(server)
    writer.write(b"POST /a HTTP/1.1\r\nx-who: me\r\ntransfer-encoding: chunked\r\n\r\n")
    writer.write(b"1\r\na\r\n0\r\nx-who: another\r\nx-more: 1\r\n\r\n")
    assert (await answer(reader))[0] == 200
    assert seen[0] == {b"x-who": b"me", b"transfer-encoding": b"chunked"}
    writer.close()
    await server.stop()


async def test_every_reason_of_the_error_table_can_be_answered() -> None:
    wire = _Wire()
    connection = Connection(Echo(), LIMIT, set())
    connection.connection_made(wire)
    for reason in Reason:
        Exchange(connection, LIMIT).respond_error(MillraceError(reason, "why"))
    assert wire.written.count(b'"code":') == len(Reason)


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

    def flood(exchange: Exchange) -> Coroutine[Any, Any, None]:
        async def run() -> None:
            nonlocal written
            exchange.begin_events()
            for _ in range(1000):
                await exchange.write(b"x" * 65536)
                written += 1
            exchange.end_events(b"end")

        return run()

    server = HttpServer(flood, "127.0.0.1:0", max_body_bytes=LIMIT)
    await server.start()
    reader, writer = await connect(server)
    writer.write(request("/a"))
    await reader.readuntil(b"\r\n\r\n")
    before = -1
    while written != before:
        before = written
        await asyncio.sleep(0.05)
    assert written < 1000
    size = 0
    while size < 1000 * 65536:
        data = await reader.read(1 << 20)
        assert data
        size += len(data)
    writer.close()
    await server.stop()


def test_an_answer_is_sent_before_anything_else_is_done() -> None:
    """What a handler does after its answer (the settlement) is nothing that the client waits for."""
    seen: list[bytes] = []

    async def ask() -> None:
        loop = asyncio.get_running_loop()
        client = socket.socket()
        client.setblocking(False)

        def handle(exchange: Exchange) -> None:
            exchange.respond(200, b"answer")
            # In the same turn of the event loop.
            seen.append(client.recv(65536))

        server = HttpServer(handle, "127.0.0.1:0", max_body_bytes=LIMIT)
        await server.start()
        with client:
            await loop.sock_connect(client, ("127.0.0.1", server.port))
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            async with asyncio.timeout(5):
                while not seen:
                    await asyncio.sleep(0.001)
        await server.stop()

    uvloop.run(ask())
    assert seen[0].endswith(b"answer")
