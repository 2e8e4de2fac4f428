"""Whoever floods a gRPC port with frames that cost it nothing: memory is bounded, and others are answered.

The tokenizer service, engines and gateways all serve through GrpcServer, whose limits these are.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.unit.runtime.test_stream_client import SERVICE, serving, talking

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEADERS, _FRAME_RESET, _FRAME_SETTINGS, _FRAME_CONTINUATION = 1, 3, 4, 9
_END_HEADERS = 4
_CANCEL = (8).to_bytes(4, "big")
# Bytes sent at most, and growth of the process that is allowed meanwhile: bytes that are read are not kept.
_FLOOD_BYTES = 1024 * 1024 * 1024
_MAX_GROWTH_BYTES = _FLOOD_BYTES // 2


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header field that is not indexed (RFC 7541, 6.2.2)."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


# :method POST and :scheme http of the static table, then the rest of a call.
_CALL = b"\x83\x86" + b"".join(
    literal(name, value)
    for name, value in (
        (b":path", f"/{SERVICE}/Hang".encode()),
        (b":authority", b"x"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    )
)


def continuations() -> Iterator[bytes]:
    """One header block without an end."""
    yield frame(_FRAME_HEADERS, _CALL, stream=1)
    part = frame(_FRAME_CONTINUATION, literal(b"x-name", b"x" * 100) * 140, stream=1)
    while True:
        yield part * 4


def settings() -> Iterator[bytes]:
    """Each asks for an answer, which is not read."""
    while True:
        yield frame(_FRAME_SETTINGS) * 5000


def resets() -> Iterator[bytes]:
    """Calls that are given up as soon as they are opened (CVE-2023-44487)."""
    stream = 1
    while True:
        yield b"".join(
            frame(_FRAME_HEADERS, _CALL, flags=_END_HEADERS, stream=each)
            + frame(_FRAME_RESET, _CANCEL, stream=each)
            for each in range(stream, stream + 1000, 2)
        )
        stream += 1000


def flood(address: str, parts: Iterator[bytes], stop: threading.Event) -> int:
    """Sends until so much is sent, nothing more is taken, or the connection is cut; bytes sent."""
    host, _, port = address.rpartition(":")
    sent = 0
    with socket.create_connection((host, int(port)), timeout=4.0) as connection:
        try:
            connection.sendall(_PREFACE + frame(_FRAME_SETTINGS))
            while sent < _FLOOD_BYTES and not stop.is_set():
                part = next(parts)
                connection.sendall(part)
                sent += len(part)
        except OSError:
            # Cut off, or not read any more.
            pass
    return sent


@pytest.mark.parametrize(("kind", "is_stopped"), [(continuations, False), (settings, True), (resets, True)])
async def test_a_flood_of_frames_takes_no_memory_and_others_do_not_notice(
    kind: Callable[[], Iterator[bytes]], is_stopped: bool
) -> None:
    process = psutil.Process()
    async with serving() as (_, _, address), talking(address, "Echo") as talk:
        talk.outbox.put(b"before")
        assert await talk.take() == b"before"
        before = process.memory_info().rss
        stop = threading.Event()
        flooding = asyncio.create_task(asyncio.to_thread(flood, address, kind(), stop))
        most, num_answers = 0, 0
        try:
            while not flooding.done():
                talk.outbox.put(b"meanwhile")
                assert await talk.take() == b"meanwhile"
                num_answers += 1
                most = max(most, process.memory_info().rss)
        finally:
            stop.set()
            sent = await flooding
        assert num_answers > 0
        if is_stopped:
            # It is not read any more, or is cut off, long before the end. Of the others it is not asked:
            # a sender gives up where processors are few and it is read slowly.
            assert 0 < sent < _FLOOD_BYTES // 2
        assert most - before < _MAX_GROWTH_BYTES
        # Whoever connects anew is served as well.
        async with talking(address, "Echo") as other:
            other.outbox.put(b"after")
            assert await other.take() == b"after"
