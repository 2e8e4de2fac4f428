"""HTTP/2 as a peer may send it: cut anywhere, broken, or meant to do harm. What is kept has a bound."""

from __future__ import annotations

import asyncio
import random
from itertools import accumulate, cycle, pairwise
from typing import Any

import grpc
import hpack
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from services.server import StreamHandlers
from services.streams import frames, server, stream
from services.streams.connection import CONNECTION_WINDOW, MAX_FRAME_BYTES, MAX_HEADER_BYTES, STREAM_WINDOW
from services.streams.front import announces_streams
from services.streams.messages import (
    MessageCutter,
    Pieces,
    StreamEnd,
    from_http_status,
    from_trailers,
    prefix,
    timeout_s,
    to_trailers,
)
from services.streams.server import MAX_STREAMS, ServerConnection, ServerStreams
from tests.unit.services.streams.rig import SERVICE, Streams, register

_PROPERTY = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60
)
_HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", f"/{SERVICE}/Echo"),
    ("content-type", "application/grpc"),
]


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        found = frames.FrameCutter(frames.LARGEST_FRAME_BYTES).feed(bytes(self.written))
        self.written.clear()
        return found


def connected(max_message_bytes: int = 1 << 20) -> tuple[ServerConnection, Wire, ServerStreams]:
    handlers = StreamHandlers()
    register(Streams(), handlers)
    streams = ServerStreams(handlers, max_message_bytes)
    connection, wire = streams.connection(), Wire()
    connection.connection_made(wire)
    return connection, wire, streams


def opening(number: int = 1, headers: list[tuple[str, str]] | None = None, flags: int = 0) -> bytes:
    block = hpack.Encoder().encode(_HEADERS if headers is None else headers)
    return frames.frame(frames.HEADERS, frames.END_HEADERS | flags, number, block)


def data(message: bytes, number: int = 1, flags: int = 0) -> bytes:
    return frames.frame(frames.DATA, flags, number, prefix(len(message)) + message)


async def echoed(connection: ServerConnection, wire: Wire, number: int = 1) -> list[bytes]:
    """Messages that have been sent on a stream by the time that nothing more happens."""
    for _ in range(50):
        await asyncio.sleep(0)
    cutter = MessageCutter(1 << 24)
    return [
        message
        for kind, _, stream, payload in wire.frames()
        if kind == frames.DATA and stream == number
        for message in cutter.feed(payload)
    ]


def code_of(wire: Wire) -> int | None:
    """Of the GOAWAY frame that was sent."""
    codes = [frames.read_goaway(payload)[1] for kind, _, _, payload in wire.frames() if kind == frames.GOAWAY]
    return codes[-1] if codes else None


@_PROPERTY
@given(cuts=st.lists(st.integers(0, 3000), max_size=30), padding=st.integers(0, 255))
async def test_what_arrives_may_be_cut_anywhere(cuts: list[int], padding: int) -> None:
    messages = [b"", b"a", b"b" * 700, b"c" * 900]
    joined = b"".join(prefix(len(each)) + each for each in messages)
    padded = bytes([padding]) + joined[500:] + bytes(padding)
    sent = (
        frames.settings({frames.SPEAKS_STREAMS: 1})
        + opening()
        + frames.frame(frames.DATA, 0, 1, joined[:500])
        + frames.frame(0x77, 0xFF, 5, b"unknown kinds say nothing")
        + frames.frame(frames.DATA, frames.PADDED, 1, padded)
    )
    connection, wire, _ = connected()
    edges = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
    for begin, end in pairwise(edges):
        connection.data_received(sent[begin:end])
    assert await echoed(connection, wire) == messages
    connection.close()


@_PROPERTY
@given(
    garbage=st.binary(max_size=400),
    kind=st.integers(0, 12),
    flags=st.integers(0, 255),
    stream=st.integers(0, 5),
    valid_head=st.booleans(),
)
@example(garbage=b"\x00" * 8, kind=frames.PING, flags=0, stream=0, valid_head=True)
@example(garbage=b"", kind=frames.CONTINUATION, flags=0, stream=1, valid_head=True)
async def test_garbage_ends_the_connection_or_is_ignored(
    garbage: bytes, kind: int, flags: int, stream: int, valid_head: bool, caplog: pytest.LogCaptureFixture
) -> None:
    connection, wire, streams = connected()
    connection.data_received(opening())
    connection.data_received(frames.frame(kind, flags, stream, garbage) if valid_head else garbage)
    connection.data_received(data(b"after"))
    assert len(connection.streams) <= MAX_STREAMS
    assert len(connection._cutter._rest) < MAX_FRAME_BYTES + frames.HEAD_BYTES
    assert wire.closed == connection.is_closed
    assert not [each for each in caplog.records if each.exc_info]
    connection.close()
    assert not streams.connections
    await asyncio.sleep(0)


@_PROPERTY
@given(seed=st.integers(0, 10_000))
async def test_a_connection_whose_bits_flip_does_no_harm(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    numbers = random.Random(seed)
    sent = bytearray(
        frames.settings({frames.INITIAL_WINDOW_SIZE: 100_000})
        + opening()
        + data(b"x" * 300)
        + frames.window_update(0, 500)
        + frames.window_update(1, 500)
        + opening(3)
        + frames.reset(1, frames.CANCEL)
        + data(b"y" * 300, 3, frames.END_STREAM)
        + frames.goaway(0, 0, "bye")
    )
    for _ in range(numbers.randint(1, 6)):
        sent[numbers.randrange(len(sent))] ^= 1 << numbers.randrange(8)
    connection, wire, _ = connected(max_message_bytes=10_000)
    for byte in sent:
        connection.data_received(bytes([byte]))
    for _ in range(20):
        await asyncio.sleep(0)
    assert wire.closed == connection.is_closed
    assert not [each for each in caplog.records if each.exc_info]
    connection.close()
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frames.head(frames.DATA, 0, 1, MAX_FRAME_BYTES + 1), frames.FRAME_SIZE_ERROR),
        (data(b"idle", 3), frames.PROTOCOL_ERROR),
        (frames.window_update(7, 1), frames.PROTOCOL_ERROR),
        (frames.reset(7, 0), frames.PROTOCOL_ERROR),
        (frames.frame(frames.WINDOW_UPDATE, 0, 0, bytes(4)), frames.PROTOCOL_ERROR),
        (frames.window_update(0, frames.MAX_WINDOW), frames.FLOW_CONTROL_ERROR),
        (opening() + frames.window_update(1, frames.MAX_WINDOW), frames.FLOW_CONTROL_ERROR),
        (frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 31}), frames.FLOW_CONTROL_ERROR),
        (frames.settings({frames.MAX_FRAME_SIZE: 100}), frames.PROTOCOL_ERROR),
        (frames.settings({frames.ENABLE_PUSH: 2}), frames.PROTOCOL_ERROR),
        (frames.frame(frames.SETTINGS, 0, 0, bytes(5)), frames.FRAME_SIZE_ERROR),
        (frames.frame(frames.SETTINGS, frames.ACK, 0, bytes(6)), frames.FRAME_SIZE_ERROR),
        (frames.frame(frames.SETTINGS, 0, 1, b""), frames.PROTOCOL_ERROR),
        (frames.frame(frames.PING, 0, 0, bytes(7)), frames.FRAME_SIZE_ERROR),
        (frames.frame(frames.PUSH_PROMISE, 0, 1, bytes(8)), frames.PROTOCOL_ERROR),
        (frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, b""), frames.PROTOCOL_ERROR),
        (
            frames.frame(frames.HEADERS, 0, 1, b"") + frames.frame(frames.PING, 0, 0, bytes(8)),
            frames.PROTOCOL_ERROR,
        ),
        (frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff" * 20), frames.COMPRESSION_ERROR),
        (opening(2), frames.PROTOCOL_ERROR),
        (opening() + frames.frame(frames.DATA, frames.PADDED, 1, b"\x09abc"), frames.PROTOCOL_ERROR),
    ],
)
async def test_what_the_protocol_forbids_ends_the_connection(sent: bytes, code: int) -> None:
    connection, wire, _ = connected()
    connection.data_received(sent)
    assert (code_of(wire), wire.closed) == (code, True)
    await asyncio.sleep(0)


async def test_headers_are_bounded_however_they_come() -> None:
    for sent in (
        # One large list; a small block that grows on decoding; a block that never ends.
        [opening(headers=[("x", "y" * MAX_HEADER_BYTES)])],
        [frames.frame(frames.HEADERS, frames.END_HEADERS, 1, _bomb())],
        [frames.frame(frames.HEADERS, 0, 1, b"")]
        + [frames.frame(frames.CONTINUATION, 0, 1, bytes(1000))] * (MAX_HEADER_BYTES // 1000 + 1),
    ):
        connection, wire, _ = connected()
        for each in sent:
            connection.data_received(each)
        assert (code_of(wire), wire.closed) == (frames.ENHANCE_YOUR_CALM, True)


def _bomb() -> bytes:
    """Puts a large header into the table once, and names it in one byte from then on."""
    encoder = hpack.Encoder()
    first = encoder.encode([("x", "y" * 3000)], huffman=False)
    return first + encoder.encode([("x", "y" * 3000)], huffman=False) * 50


@pytest.mark.parametrize(
    "sent",
    [
        frames.frame(frames.PING, 0, 0, bytes(8)),
        frames.settings({}),
        frames.frame(frames.DATA, 0, 1, b""),
        frames.frame(0x42, 0, 1, b""),
        frames.frame(frames.PRIORITY, 0, 1, bytes(5)),
    ],
)
async def test_frames_that_carry_nothing_come_to_an_end(sent: bytes) -> None:
    connection, wire, _ = connected()
    connection.data_received(opening())
    for _ in range(200):
        connection.data_received(sent * 100)
    assert (code_of(wire), wire.closed) == (frames.ENHANCE_YOUR_CALM, True)
    await asyncio.sleep(0)


async def test_streams_that_are_opened_and_reset_come_to_an_end() -> None:
    connection, wire, _ = connected()
    for number in range(1, 2001, 2):
        connection.data_received(opening(number) + frames.reset(number, frames.CANCEL))
    assert (code_of(wire), wire.closed) == (frames.ENHANCE_YOUR_CALM, True)
    assert not connection.streams
    await asyncio.sleep(0)


async def test_answers_that_nobody_reads_are_not_kept() -> None:
    connection, wire, _ = connected()
    connection.pause_writing()
    wire.written.clear()
    for _ in range(100):
        connection.data_received(frames.frame(frames.PING, 0, 0, bytes(8)) * 90)
    assert wire.closed
    assert len(wire.written) < 200_000


async def test_more_streams_than_are_allowed_are_refused() -> None:
    connection, wire, _ = connected()
    for number in range(1, 2 * MAX_STREAMS + 2, 2):
        connection.data_received(opening(number))
    assert len(connection.streams) == MAX_STREAMS
    refused = [(stream, payload) for kind, _, stream, payload in wire.frames() if kind == frames.RST_STREAM]
    assert refused == [(2 * MAX_STREAMS + 1, frames.REFUSED_STREAM.to_bytes(4, "big"))]
    connection.close()
    await asyncio.sleep(0)


async def test_a_peer_that_sends_beyond_its_window_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    # The handler never runs, so nothing is read.
    monkeypatch.setattr(server.ServerCall, "start", lambda *_: None)
    connection, wire, _ = connected(max_message_bytes=1 << 30)
    connection.data_received(opening())
    sent = 0
    piece = data(bytes(50_000))
    while not wire.closed and sent < 4 * CONNECTION_WINDOW:
        connection.data_received(piece)
        sent += 50_000
    assert code_of(wire) == frames.FLOW_CONTROL_ERROR
    # Credit is given until the messages that nobody has taken fill a window.
    assert sent <= 3 * STREAM_WINDOW


async def test_a_message_that_is_too_large_is_refused_by_its_first_bytes() -> None:
    connection, wire, _ = connected(max_message_bytes=1000)
    connection.data_received(opening() + frames.frame(frames.DATA, 0, 1, prefix(1001)))
    decoder = hpack.Decoder()
    blocks = [decoder.decode(payload) for kind, _, _, payload in wire.frames() if kind == frames.HEADERS]
    trailers = {str(name): str(value) for name, value in blocks[-1]}
    assert from_trailers(trailers).code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not connection.streams
    assert not wire.closed
    connection.close()
    await asyncio.sleep(0)


async def test_a_small_window_of_the_peer_is_honoured() -> None:
    connection, wire, _ = connected()
    connection.data_received(frames.settings({frames.INITIAL_WINDOW_SIZE: 10}) + opening() + data(b"x" * 100))
    for _ in range(20):
        await asyncio.sleep(0)
    sent = b"".join(payload for kind, _, _, payload in wire.frames() if kind == frames.DATA)
    assert len(sent) == 10
    connection.data_received(frames.window_update(1, 20))
    sent += b"".join(payload for kind, _, _, payload in wire.frames() if kind == frames.DATA)
    assert len(sent) == 30
    # A smaller window than what is under way: nothing until it is positive again.
    connection.data_received(frames.settings({frames.INITIAL_WINDOW_SIZE: 0}) + frames.window_update(1, 5))
    assert not [each for each in wire.frames() if each[0] == frames.DATA]
    connection.data_received(frames.settings({frames.INITIAL_WINDOW_SIZE: 1000}))
    sent += b"".join(payload for kind, _, _, payload in wire.frames() if kind == frames.DATA)
    assert MessageCutter(1000).feed(sent) == [b"x" * 100]
    connection.close()
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ([(":method", "GET"), *_HEADERS[1:]], grpc.StatusCode.INVALID_ARGUMENT),
        ([*_HEADERS[:3], ("content-type", "text/plain")], grpc.StatusCode.INVALID_ARGUMENT),
        ([*_HEADERS[:2], (":path", "/x/Y"), _HEADERS[3]], grpc.StatusCode.UNIMPLEMENTED),
        ([], grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_what_is_no_call_is_told_so(headers: list[tuple[str, str]], code: grpc.StatusCode) -> None:
    connection, wire, _ = connected()
    connection.data_received(opening(headers=headers))
    blocks = [hpack.Decoder().decode(each[3]) for each in wire.frames() if each[0] == frames.HEADERS]
    assert from_trailers({str(name): str(value) for name, value in blocks[0]}).code is code
    assert not connection.streams
    connection.close()


@given(st.text(max_size=300), st.sampled_from(list(grpc.StatusCode)), st.binary(max_size=300))
def test_a_status_survives_its_trailers(details: str, code: grpc.StatusCode, rich: bytes) -> None:
    details = details.encode("utf-8", "ignore").decode()
    end = from_trailers(dict(to_trailers(StreamEnd(code, details, rich))))
    assert (end.code, end.rich) == (code, rich)
    assert end.details == details
    for _, value in to_trailers(StreamEnd(code, details, rich)):
        assert value.isascii()
        assert value.isprintable()


@given(
    st.dictionaries(st.sampled_from(["grpc-status", "grpc-message", "grpc-status-details-bin"]), st.text())
)
def test_trailers_of_any_kind_are_a_status(trailers: dict[str, str]) -> None:
    assert from_trailers(trailers).error is not None
    assert from_http_status(trailers.get("grpc-status", "")).code is not grpc.StatusCode.OK


def test_timeouts_are_read() -> None:
    assert [timeout_s(text) for text in ("2H", "3M", "4S", "5m", "6u", "7n")] == pytest.approx(
        [7200, 180, 4, 5e-3, 6e-6, 7e-9]
    )
    assert [timeout_s(text) for text in ("", "S", "1", "-1S", "1.5S", "123456789S", "²S")] == [None] * 7


def test_who_announces_itself_is_told_apart() -> None:
    ours = frames.PREFACE + frames.settings({frames.ENABLE_PUSH: 0, frames.SPEAKS_STREAMS: 1})
    for size in range(len(ours)):
        assert announces_streams(ours[:size]) is None
    assert announces_streams(ours) is True
    assert announces_streams(ours + b"more") is True
    for other in (
        frames.PREFACE + frames.settings({frames.ENABLE_PUSH: 0}),
        frames.PREFACE + frames.frame(frames.PING, 0, 0, bytes(8)),
        frames.PREFACE + frames.head(frames.SETTINGS, 0, 0, 100_000),
        frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0, bytes(5)),
        b"GET / HTTP/1.1\r\n",
        b"\x16\x03\x01",
    ):
        assert announces_streams(other) is False


@_PROPERTY
@given(
    sizes=st.lists(st.sampled_from([0, 1, 4, 5, 6, 300, 9_000, 40_000, 300_000]), max_size=8),
    pieces=st.lists(st.sampled_from([1, 2, 5, 100, 8_191, 8_192, 8_193, 20_000]), min_size=1, max_size=20),
)
def test_messages_are_the_same_however_they_are_cut(sizes: list[int], pieces: list[int]) -> None:
    messages = [bytes([number]) * size for number, size in enumerate(sizes, 1)]
    sent = b"".join(prefix(len(each)) + each for each in messages)
    cutter = MessageCutter(300_000)
    found: list[bytes] = []
    position = 0
    # Too many small pieces of the large messages would only take time.
    for size in cycle([max(each, len(sent) // 500) for each in pieces]):
        if position >= len(sent):
            break
        found += map(bytes, cutter.feed(sent[position : position + size]))
        position += size
        assert cutter.is_between == (sum(len(each) + 5 for each in found) == min(position, len(sent)))
    assert found == messages


@given(sizes=st.lists(st.integers(0, 20), max_size=6), begin=st.integers(-30, 130), end=st.integers(-30, 130))
def test_slices_of_pieces_are_those_of_the_whole(sizes: list[int], begin: int, end: int) -> None:
    whole = bytes(random.Random(1).randbytes(sum(sizes)))
    cuts = [0, *accumulate(sizes)]
    pieces = Pieces([memoryview(whole[low:high]) for low, high in pairwise(cuts)])
    assert (len(pieces), bytes(pieces)) == (len(whole), whole)
    found = pieces[begin:end]
    assert (len(found), bytes(found)) == (len(whole[begin:end]), whole[begin:end])


async def test_more_of_a_large_message_is_asked_for_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_LARGE_PAUSE_S", 0.02)
    connection, wire, _ = connected(max_message_bytes=1 << 24)
    connection.data_received(opening())

    def asked() -> int:
        return sum(
            frames.read_number(payload, "")
            for kind, _, number, payload in wire.frames()
            if kind == frames.WINDOW_UPDATE and number == 1
        )

    message = prefix(1_000_000) + bytes(1_000_000)
    half = STREAM_WINDOW // 2
    pieces = [message[at : at + 50_000] for at in range(0, len(message), 50_000)]
    for piece in pieces[: -(-half // 50_000)]:
        connection.data_received(frames.frame(frames.DATA, 0, 1, piece))
    assert asked() == 0
    async with asyncio.timeout(20):
        while not (num_bytes := asked()):
            await asyncio.sleep(0.001)
    assert num_bytes >= half
    connection.data_received(frames.frame(frames.RST_STREAM, 0, 1, bytes(4)))
    connection.close()
