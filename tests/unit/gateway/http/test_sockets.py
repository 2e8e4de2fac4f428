"""WebSockets byte by byte: which requests open one, and what becomes of bytes that are no frames."""

from __future__ import annotations

import asyncio
import os
import struct
from contextlib import suppress

import pytest

from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.http.serving import answer
from tests.unit.gateway.rig.deployment import Deployment, deployed, signed_context

HANDSHAKE = {
    "connection": "Upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
}


def head(path: str = "/v1/responses", method: str = "GET", **changed: str) -> bytes:
    headers = {CONTEXT_HEADER: signed_context(), **HANDSHAKE}
    headers |= {name.replace("_", "-"): value for name, value in changed.items()}
    lines = [f"{method} {path} HTTP/1.1", "host: a", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def frame(payload: bytes, opcode: int = 1, *, is_last: bool = True) -> bytes:
    """As a client sends it, masked with zeros."""
    first = (0x80 if is_last else 0) | opcode
    size = bytes([0x80 | len(payload)])
    if len(payload) > 125:
        size = bytes([0x80 | 126]) + struct.pack("!H", len(payload))
    return bytes([first]) + size + bytes(4) + payload


async def talk(stack: Deployment, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.http.port)
    writer.write(sent)
    return reader, writer


async def opened(stack: Deployment, behind: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await talk(stack, head() + behind)
    assert b" 101 " in (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[0] + b" "
    return reader, writer


async def received(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """A frame of the server's: its opcode and its payload."""
    first, size = await reader.readexactly(2)
    if size == 126:
        (size,) = struct.unpack("!H", await reader.readexactly(2))
    return first & 15, await reader.readexactly(size)


async def test_only_a_whole_handshake_at_its_path_opens_a_socket() -> None:
    async with deployed() as stack:
        # What is no handshake of RFC 6455 is refused as one.
        for faulty in (head(sec_websocket_version="8"), head().replace(b"sec-websocket-key", b"x-key")):
            reader, writer = await talk(stack, faulty)
            assert int((await reader.readline()).split()[1]) in (400, 426)
            # And the connection ends.
            await reader.read()
            writer.close()
        # Elsewhere, with another method and with a body a request is what it is without an upgrade.
        others = (
            head("/v1/models"),
            head("/v1/responses/x"),
            head(content_length="2") + b"{}",
            head(upgrade="h2c"),
        )
        statuses = []
        for other in others:
            reader, writer = await talk(stack, other)
            statuses.append((await answer(reader))[0])
            writer.close()
        assert statuses == [200, 404, 405, 405]
        reader, writer = await talk(stack, head(method="POST", content_length="2") + b"{}")
        assert (await answer(reader))[0] == 400
        writer.close()


async def test_events_may_come_with_the_handshake_and_in_pieces() -> None:
    event = b'{"type":"response.create","model":"tiny","input":"hi"}'
    async with deployed() as stack:
        pieces = frame(event[:9], is_last=False) + frame(b"", 9) + frame(event[9:20], 0, is_last=False)
        reader, writer = await opened(stack, pieces)
        assert await received(reader) == (10, b"")
        last = frame(event[20:], 0)
        for index in range(len(last)):
            writer.write(last[index : index + 1])
            await asyncio.sleep(0)
        kinds = []
        while not kinds or b"response.completed" not in kinds[-1]:
            kinds.append((await received(reader))[1])
        assert kinds[0].startswith(b'{"type":"response.created"')
        writer.write(frame(struct.pack("!H", 1000), 8))
        assert (await received(reader))[0] == 8
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(
    "garbage",
    [
        frame(b"\xff\xfe\xfd"),
        b"\x81\x05hello",
        b"GET / HTTP/1.1\r\n\r\n",
        frame(b"x", 3),
        frame(b"x", 0),
        b"\x81\xff" + b"\xff" * 12,
        frame(b"x" * 126, 9),
        b"\xf1" + frame(b"{}")[1:],
        b"\x7f" * 400,
        b"\xff" * 400,
    ],
)
async def test_bytes_that_are_no_frames_close_their_connection_alone(garbage: bytes) -> None:
    async with deployed() as stack:
        reader, writer = await opened(stack)
        other, asking = await opened(stack)
        writer.write(garbage)
        rest = await asyncio.wait_for(reader.read(), 20)
        # A close frame with 1002 or 1007, and nothing more.
        assert rest[:1] in (b"\x88", b"")
        writer.close()
        asking.write(frame(b"{}"))
        assert (await received(other))[0] == 1
        asking.close()


@pytest.mark.parametrize("opcode", [0, 1, 9, 10])
async def test_a_flood_of_small_frames_ends_its_connection(opcode: int) -> None:
    async with deployed() as stack:
        reader, writer = await opened(stack)
        first = frame(b"x", is_last=False) if opcode == 0 else b""
        writer.write(first + frame(b"x", opcode, is_last=opcode != 0) * 20_000)
        kinds = []
        while not kinds or kinds[-1][0] != 8:
            kinds.append(await received(reader))
        assert struct.unpack("!H", kinds[-1][1][:2]) == (1008,)
        assert b"more than 256 frames" in kinds[-2][1]
        # Of so many it has not even answered those that came with the last read.
        assert len(kinds) < 20_000
        writer.close()
        assert (await stack.chat()).status_code == 200


async def test_random_bytes_disturb_nobody() -> None:
    async with deployed() as stack:
        for size in (1, 2, 10, 1000, 70_000):
            reader, writer = await opened(stack)
            writer.write(os.urandom(size))
            writer.write_eof()
            with suppress(ConnectionResetError):
                await asyncio.wait_for(reader.read(), 20)
            writer.close()
        sockets = stack.gateway.http._application.sockets
        assert sockets is not None
        while sockets._open:
            await asyncio.sleep(0.01)
        assert (await stack.chat()).status_code == 200
