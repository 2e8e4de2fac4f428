"""Floods of little things: refused requests, and connections that say much, or little, about nothing.

Each goes on until it is cancelled and counts what became of it. Frames are written a few hundred together.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Mapping

from benchmarks.neighbour import http2
from benchmarks.neighbour.requests import (
    CHAT,
    Attack,
    Target,
    chat_body,
    http2_fields,
    repeatedly,
    request_head,
    status,
)
from benchmarks.neighbour.tenants import REFUSED_KEY

_LIMIT_S = 60.0
_NUM_TOGETHER = 200
# Connections that are opened at a time; and those that only stand there.
_WIDTH, _NUM_IDLE = 16, 2000
# A byte of a head follows the one before after so long.
_BYTE_EVERY_S = 0.5


def refused(change: Callable[[Target, int], Target]) -> Attack:
    """Small requests one after the other on connections that are kept, each with the target so changed."""

    async def attack(target: Target, outcomes: Counter[str]) -> None:
        numbers = itertools.count()

        async def once() -> None:
            writer = None
            try:
                reader, writer = await asyncio.open_connection(target.host, target.port)
                while True:
                    asker = change(target, next(numbers))
                    path, body = chat_body(asker)
                    writer.write(request_head(asker, path, len(body)) + body)
                    outcomes[await _answered(reader)] += 1
            except (OSError, EOFError):
                outcomes["connection lost"] += 1
            finally:
                if writer is not None:
                    writer.close()

        await repeatedly(_WIDTH, once)

    return attack


async def _answered(reader: asyncio.StreamReader) -> str:
    """The status of an answer that is read to its end; raises EOFError where there is none."""
    found, length = await status(reader), 0
    while (line := (await reader.readline()).strip()) != b"":
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    if not found.isdigit():
        raise EOFError
    await reader.readexactly(length)
    return found


def frames(begin: Callable[[Target], bytes], again: bytes) -> Attack:
    """A connection of HTTP/2 on which something begins, and then the same frames come without an end."""

    async def attack(target: Target, outcomes: Counter[str]) -> None:
        first = begin(target)

        async def once() -> None:
            writer = None
            try:
                reader, writer = await http2.connected(target.host, target.port)
                writer.write(first)
                # What the server says is read, and not looked at, so that it always gets rid of it.
                said = asyncio.ensure_future(_to_the_end(reader))
                while not said.done():
                    writer.write(again * _NUM_TOGETHER)
                    outcomes["frames"] += _NUM_TOGETHER
                    await writer.drain()
                    await asyncio.sleep(0)
                outcomes["connection ended"] += 1
            except OSError:
                outcomes["connection lost"] += 1
            finally:
                if writer is not None:
                    writer.close()

        await repeatedly(_WIDTH, once)

    return attack


async def _to_the_end(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(1 << 16):
            pass
    except OSError:
        pass


def _head(target: Target) -> bytes:
    return http2.headers(1, http2_fields(target, CHAT, ("content-type", "application/json")))


def _begun_head(target: Target) -> bytes:
    return http2.headers(1, http2_fields(target, CHAT), is_whole=False)


async def slow_heads(target: Target, outcomes: Counter[str]) -> None:
    """Connections whose request's head comes byte by byte and never ends."""
    endless = request_head(target, CHAT, 2).rstrip(b"\r\n") + b"\r\nx-more: "

    async def once() -> None:
        writer = None
        try:
            reader, writer = await asyncio.open_connection(target.host, target.port)
            writer.write(endless)
            outcomes["opened"] += 1
            said = asyncio.ensure_future(status(reader))
            while not said.done():
                writer.write(b"a")
                await writer.drain()
                await asyncio.wait({said}, timeout=_BYTE_EVERY_S)
            outcomes[said.result()] += 1
        except OSError:
            outcomes["connection lost"] += 1
            await asyncio.sleep(0.1)
        finally:
            if writer is not None:
                writer.close()

    await repeatedly(500, once)


async def idle_connections(target: Target, outcomes: Counter[str]) -> None:
    """Connections on which nothing is ever said."""

    async def once() -> None:
        writer = None
        try:
            reader, writer = await asyncio.open_connection(target.host, target.port)
            outcomes["opened"] += 1
            async with asyncio.timeout(_LIMIT_S):
                await reader.read(1)
            outcomes["ended by the server"] += 1
        except (OSError, TimeoutError):
            outcomes["connection lost"] += 1
            await asyncio.sleep(0.1)
        finally:
            if writer is not None:
                writer.close()

    await repeatedly(_NUM_IDLE, once)


FLOODS: Mapping[str, Attack] = {
    "wrong keys": refused(lambda target, number: target._replace(key=f"mr-wrong-{number}")),
    "requests over the limit": refused(lambda target, _: target._replace(key=REFUSED_KEY)),
    "unknown model names": refused(lambda target, number: target._replace(model=f"model-{number}")),
    "CONTINUATION frames": frames(_begun_head, http2.continuation(1, [("x-more", "a")])),
    "SETTINGS frames": frames(lambda _: b"", http2.frame(http2.SETTINGS, 0, 0)),
    "empty DATA frames": frames(_head, http2.data(1, b"")),
    "500 heads byte by byte": slow_heads,
    "2,000 idle connections": idle_connections,
}
