"""A server for tests of the HTTP face by itself, and a client that sees every byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from contract.errors import MillraceError
from gateway.faces.error_forms import ERROR_FORMS
from gateway.http.connection import Connection
from gateway.http.exchange import Exchange, Handler
from gateway.http.server import HttpServer

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
            body = f"{exchange.method} {exchange.path} ".encode() + exchange.take_body()
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
    server = HttpServer(handler, "127.0.0.1:0", max_body_bytes=LIMIT, error_forms=ERROR_FORMS)
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
