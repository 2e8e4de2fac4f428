"""However a stream ends, whoever uses it is told; what waits is bounded, and not copied for every frame."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import uvloop
from millrace.common.v1 import chat_pb2

from services.errors import MillraceError
from services.streams import frames
from services.streams.client import open_stream
from services.streams.messages import taken_together
from services.streams.server import ServerCall
from services.streams.stream import STREAM_WINDOW
from tests.unit.services.streams.test_protocol import SERVICE, code_of, connected, data, opening


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def hanging() -> bytes:
    return opening(
        headers=[(":method", "POST"), (":path", f"/{SERVICE}/Hang"), ("content-type", "application/grpc")]
    )


def test_a_connection_that_is_closed_in_the_moment_it_is_made_is_an_error() -> None:
    num_attempts = 30
    goodbye = frames.settings({}) + frames.goaway(0, frames.NO_ERROR)

    def say_goodbye() -> None:
        with ExitStack() as kept:
            for _ in range(num_attempts):
                kept.enter_context(server.accept()[0]).sendall(goodbye)

    async def attempts(port: int) -> set[str]:
        found = set()
        for _ in range(num_attempts):
            ended: asyncio.Future[MillraceError | None] = asyncio.get_running_loop().create_future()
            try:
                await open_stream(f"127.0.0.1:{port}", "/a/B", on_message=print, on_end=ended.set_result)
            except MillraceError:
                found.add("raised")
            else:
                found.add("told" if await asyncio.wait_for(ended, 30) else "ended well")
        return found

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as threads:
        server.settimeout(30)
        threads.submit(say_goodbye)
        # uvloop reads before the task that connects goes on.
        assert uvloop.run(attempts(server.getsockname()[1])) <= {"raised", "told"}


async def test_a_peer_that_sends_before_its_headers_ends_the_call() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(frames.PREFACE))
        cutter = frames.FrameCutter(frames.LARGEST_FRAME_BYTES)
        while not any(kind == frames.HEADERS for kind, *_ in cutter.feed(await reader.read(65536))):
            pass
        writer.write(frames.settings({}) + data(b""))
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        port = server.sockets[0].getsockname()[1]
        await open_stream(f"127.0.0.1:{port}", "/a/B", on_message=print, on_end=ended.set_result)
        error = await asyncio.wait_for(ended, 30)
    assert isinstance(error, MillraceError)


async def test_a_client_that_sends_after_its_end_ends_the_handler() -> None:
    connection, wire, _ = connected()
    connection.data_received(hanging())
    await settled()
    assert len(connection.calls) == 1
    connection.data_received(frames.frame(frames.DATA, frames.END_STREAM, 1) + data(b"more"))
    await settled()
    assert not connection.calls
    resets = [payload for kind, _, _, payload in wire.frames() if kind == frames.RST_STREAM]
    assert [frames.read_number(payload, "RST_STREAM") for payload in resets] == [frames.STREAM_CLOSED]
    connection.close()


async def test_a_call_that_is_reset_at_once_leaves_nothing_until_its_deadline() -> None:
    connection, _, _ = connected()
    headers = [
        (":method", "POST"),
        (":path", f"/{SERVICE}/Hang"),
        ("content-type", "application/grpc"),
        ("grpc-timeout", "99999999H"),
    ]
    connection.data_received(opening(headers=headers) + frames.reset(1, frames.CANCEL))
    connection.close()
    await settled()
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, ServerCall)]


async def test_messages_without_content_are_bounded_as_well() -> None:
    connection, wire, _ = connected()
    connection.data_received(hanging())
    await settled()
    (call,) = connection.calls
    many = frames.frame(frames.DATA, 0, 1, bytes(5) * 3000)
    for _ in range(4 * STREAM_WINDOW // len(many)):
        connection.data_received(many)
    assert code_of(wire) == frames.FLOW_CONTROL_ERROR
    assert len(call._requests) <= STREAM_WINDOW // 5
    await settled()


async def test_what_is_left_of_a_message_is_not_copied_for_every_frame() -> None:
    connection, wire, _ = connected()
    connection.data_received(
        frames.settings({frames.INITIAL_WINDOW_SIZE: 0}) + frames.window_update(0, 1 << 20)
    )
    connection.data_received(opening())
    stream = connection.streams[1]
    message = bytes(range(256)) * 400
    stream.send(message)
    (waiting,) = stream._pending
    for _ in range(9):
        connection.data_received(frames.window_update(1, 10_000))
    assert stream._pending[0] is waiting
    connection.data_received(frames.window_update(1, 100_000))
    assert not stream.is_congested
    sent = b"".join(payload for kind, _, _, payload in wire.frames() if kind == frames.DATA)
    assert sent[5:] == message
    connection.close()
    await settled()


@pytest.mark.parametrize(
    ("sizes", "first"),
    [
        ([10], 1),
        ([10] * 20, 8),
        ([200_000, 100_000], 1),
        ([500_000, 10], 1),
        ([100_000, 100_000, 100_000], 2),
    ],
)
def test_few_and_small_messages_go_together(sizes: list[int], first: int) -> None:
    waiting = deque(chat_pb2.Message(content="x" * size) for size in sizes)
    assert len(taken_together(waiting)) == first
    assert len(waiting) == len(sizes) - first
