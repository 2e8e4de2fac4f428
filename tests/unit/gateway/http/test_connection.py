"""The HTTP server over real sockets: requests in any cut, answers in order, clients that leave, the stop."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import MillraceError, Reason
from gateway.faces.error_forms import ERROR_FORMS
from gateway.http import server as server_module
from gateway.http.connection import Connection
from gateway.http.exchange import Exchange
from gateway.http.server import HttpServer
from tests.unit.gateway.http.serving import (
    LIMIT,
    Echo,
    answer,
    connect,
    request,
    served,
    serving,
)


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


async def test_http_1_0_gets_events_as_they_come_without_chunks_until_the_connection_closes() -> None:
    async with served() as (echo, server), asyncio.timeout(10):
        reader, writer = await connect(server)
        writer.write(b"GET /held HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"content-length" not in head
        assert b"connection: close" in head
        assert await reader.readuntil(b"\n\n") == b"data: 0\n\n"
        echo.proceed.set()
        assert await reader.read() == b"data: [DONE]\n\n"
        writer.close()


async def test_http_1_0_gets_whole_answers_with_their_length() -> None:
    async with served() as (_, server):
        reader, writer = await connect(server)
        writer.write(b"GET /a HTTP/1.0\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert b"content-length: 7" in head
        assert body == b"GET /a "
        writer.close()


async def test_an_unexpected_failure_is_answered_in_openais_form_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(exchange: Exchange) -> None:
        raise ZeroDivisionError("unforeseen")

    async with serving(fail) as server:
        reader, writer = await connect(server)
        writer.write(request("/health", b"", "x-request-id: abc"))
        status, headers, body = await answer(reader)
        writer.close()
    assert (status, headers["content-type"], headers["x-request-id"]) == (500, "application/json", "abc")
    assert msgspec.json.decode(body)["error"]["reason"] == "INTERNAL"
    (record,) = caplog.records
    assert "/health" in record.getMessage()
    assert "abc" in record.getMessage()


async def test_every_reason_of_the_error_table_can_be_answered() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        raise AssertionError("there is no body to read")

    scope = {"method": "GET", "path": "/", "headers": []}
    for reason in Reason:
        exchange = Exchange(scope, receive, send, LIMIT, ERROR_FORMS.default)
        await exchange.respond_error(MillraceError(reason, "why"))
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


async def test_client_that_leaves_is_noticed_while_others_of_its_requests_wait() -> None:
    gone = asyncio.Event()
    num_begun = 0

    async def stream(exchange: Exchange) -> None:
        nonlocal num_begun
        num_begun += 1
        exchange.watch_client(gone.set)
        await exchange.begin_events()
        while not gone.is_set():
            await exchange.write(b"data: 0\n\n")
            await asyncio.sleep(0)

    async with serving(stream) as server:
        reader, writer = await connect(server)
        writer.write(request("/a") + request("/a"))
        await reader.readuntil(b"data: 0")
        writer.transport.abort()
        await asyncio.wait_for(gone.wait(), 10)
    assert num_begun == 1, "what waits is not begun"


@pytest.fixture
def _only_what_is_new() -> Iterator[None]:
    """What other tests left is not looked through: of a whole stage that takes seconds."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_only_what_is_new")
async def test_a_connection_that_its_client_resets_leaves_nothing() -> None:
    async with served() as (_, server):
        reader, writer = await connect(server)
        writer.write(request("/a"))
        await answer(reader)
        # Other tests' connections may not have been collected yet: it is known by its client's port.
        own = writer.get_extra_info("sockname")
        (connection,) = (each for each in gc.get_objects() if type(each) is Connection and each.client == own)
        left = weakref.ref(connection)
        del connection
        reset = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        writer.transport.abort()
        async with asyncio.timeout(10):
            while left() is not None:
                await asyncio.sleep(0.001)
                gc.collect()


async def test_answer_that_breaks_off_ends_the_connection_without_its_last_chunk() -> None:
    async with served() as (_, server):
        reader, writer = await connect(server)
        writer.write(request("/breaks"))
        assert (await reader.read()).endswith(b"data: 0\n\n\r\n")
        writer.close()


async def test_requests_that_would_switch_protocols_are_answered_in_this_one() -> None:
    async with served() as (_, server):
        reader, writer = await connect(server)
        writer.write(request("/a", b"", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c"))
        assert (await answer(reader))[2] == b"POST /a "
        writer.close()


@pytest.mark.parametrize("protocol", ["h2c", "websocket", "foo"])
@pytest.mark.parametrize("chunked", [False, True])
async def test_body_of_a_request_that_would_switch_protocols_stays_a_body(
    protocol: str, chunked: bool
) -> None:
    upgrade = ("Connection: Upgrade", f"Upgrade: {protocol}")
    inner = request("/behind", b"", method="GET")
    if chunked:
        head = "\r\n".join(["POST /a HTTP/1.1", *upgrade, "Transfer-Encoding: chunked", "", ""]).encode()
        stream = head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(inner), inner)
    else:
        stream = request("/a", inner, *upgrade)
    async with served() as (echo, server):
        for cut in (0, stream.index(inner), stream.index(inner) + 3, len(stream)):
            reader, writer = await connect(server)
            writer.write(stream[:cut])
            # The server reads this piece before the next is there.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            # Another such request behind it is one of its own.
            writer.write(stream[cut:] * (1 if cut else 2))
            for _ in range(1 if cut else 2):
                assert (await answer(reader))[2] == b"POST /a " + inner
            writer.close()
        assert set(echo.seen) == {"/a"}


async def test_head_has_no_body_and_close_is_kept() -> None:
    async with served() as (_, server):
        reader, writer = await connect(server)
        writer.write(request("/a", b"", "Connection: close", method="HEAD"))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert b"content-length: 8" in head
        assert b"connection: close" in head
        assert body == b""
        writer.close()


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


async def test_stop_closes_what_is_idle_and_lets_the_rest_end() -> None:
    echo = Echo()
    server = HttpServer(echo, "127.0.0.1:0", max_body_bytes=LIMIT, error_forms=ERROR_FORMS)
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


async def test_stop_waits_for_what_it_has_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_FAREWELL_S", 0.05)
    begun = asyncio.Event()
    settled = asyncio.Event()

    async def settle(exchange: Exchange) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(3):
                await asyncio.sleep(0)
            settled.set()

    async with serving(settle) as server:
        _, writer = await connect(server)
        writer.write(request("/a"))
        await begun.wait()
        await server.stop()
        assert settled.is_set()
        writer.close()


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


@pytest.mark.parametrize("version", [b" HTTP/1.0", b" HTTP/0.9", b" HTTP/2.0", b""])
@pytest.mark.parametrize("method", [b"POST", b"GET"])
@pytest.mark.parametrize("length", [b"", b"content-length: 5\r\n"])
async def test_a_transfer_coding_in_another_http_than_1_1_is_faulty_framing(
    method: bytes, length: bytes, version: bytes
) -> None:
    async with served() as (_, server):
        reader, writer = await connect(server)
        head = method + b" /a" + version + b"\r\nconnection: keep-alive\r\n" + length
        writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
        said = await reader.read()
        assert said.startswith(b"HTTP/1.1 400 ")
        writer.close()
