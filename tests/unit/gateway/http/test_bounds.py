"""What anybody may send to the HTTP server is bounded, refused in OpenAI's form, and disturbs nobody."""

from __future__ import annotations

import asyncio
import resource

import pytest

from gateway.http import exchange as exchange_module
from gateway.http.exchange import Exchange
from tests.unit.gateway.http.serving import (
    answer,
    connect,
    connections,
    request,
    served,
    serving,
)


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


@pytest.mark.parametrize(
    ("garbage", "problem"),
    [
        (b"not http\r\n\r\n", b"Invalid method encountered"),
        (b"GET / HTTP/1.1\r\ncontent-length: x\r\n\r\n", b"Invalid character in Content-Length"),
        (b"GET / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", b"Duplicate Content-Length"),
        (b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", b"CONNECT asks for a proxy"),
        (b"\x16\x03\x01\x02\x00", b"Invalid method encountered"),
        (b"GET http:// HTTP/1.1\r\n\r\n", b"its target is no path"),
    ],
)
async def test_malformed_requests_get_an_openai_error_and_the_end(garbage: bytes, problem: bytes) -> None:
    async with served() as (_, server):
        reader, writer = await connect(server)
        writer.write(garbage)
        status, headers, body = await answer(reader)
        assert (status, headers["connection"]) == (400, "close")
        assert b"MALFORMED_BODY" in body
        assert b"not valid HTTP/1.1: " + problem in body
        assert await reader.read() == b""
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
