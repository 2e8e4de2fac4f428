"""Long-lived streams over real sockets: our client, gRPC's server with our options, and other peers."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from opentelemetry import trace

from contract.errors import MillraceError, Reason
from runtime import channels, server
from runtime.channels import connect
from runtime.errors import ConfigError
from runtime.server import GrpcServer
from runtime.streams import Outbox, run_stream
from tests.unit.large_pieces import nothing_large_is_kept

SERVICE = "test.Streams"
_END = object()
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_PING = bytes([0, 0, 8, 6, 0, 0, 0, 0, 0]) + bytes(8)


class Streams:
    """What is served. Messages are bytes, but for Parse."""

    def __init__(self) -> None:
        self.num_messages = 0
        self.num_sent = 0
        self.cancelled = asyncio.Event()
        self.release = asyncio.Event()

    async def Echo(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for message in requests:
            self.num_messages += 1
            yield message
            del message

    async def Refuse(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            raise MillraceError(
                Reason.TEMPLATE_FAILED, "50 % ümlaut\nline", field="messages", metadata={"at": "3"}
            )
        yield b""

    async def Break(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for message in requests:
            yield message
            raise RuntimeError("secret")

    async def Tell(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        """Who calls: a header, and the trace that is current."""
        metadata = dict(context.invocation_metadata())
        span = trace.get_current_span().get_span_context()
        yield f"{metadata.get('x-name')} {span.trace_id:x}".encode()

    async def Hang(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"begun"
            await self.release.wait()
            yield b"released"
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def Flood(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for message in requests:
            num_messages, size = map(int, message.split())
            for number in range(num_messages):
                yield number.to_bytes(4, "big").ljust(size, b".")
                self.num_sent += 1

    async def Parse(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for message in requests:
            yield message.value


def register(servicer: Streams, target: Any) -> None:
    """As generated code does."""
    names = [name for name in dir(servicer) if name[0].isupper()]
    handlers = {
        name: grpc.stream_stream_rpc_method_handler(
            getattr(servicer, name), BytesValue.FromString if name == "Parse" else None
        )
        for name in names
    }
    target.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


@asynccontextmanager
async def serving(listen: str = "127.0.0.1:0") -> AsyncIterator[tuple[Streams, GrpcServer, str]]:
    servicer = Streams()
    running = GrpcServer(listen)
    running.add(register, servicer, SERVICE)
    await running.start()
    try:
        yield servicer, running, listen if listen.startswith("unix:") else f"127.0.0.1:{running.port}"
    finally:
        await running.stop(0)


class Talk:
    """A call by our client."""

    def __init__(
        self,
        address: str,
        method: str,
        metadata: tuple[tuple[str, str], ...] = (),
        take: Callable[[bytes], None] | None = None,
        join: Callable[[list[bytes]], bytes] = b"".join,
        silence_limit_s: float = math.inf,
    ) -> None:
        self.outbox: Outbox[bytes] = Outbox(len, max_together=1)
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.task = asyncio.create_task(
            run_stream(
                address,
                f"/{SERVICE}/{method}",
                self.outbox,
                join,
                take or self.inbox.put_nowait,
                metadata=metadata,
                unavailable=Reason.ENGINE_UNAVAILABLE,
                silence_limit_s=silence_limit_s,
            )
        )
        self.task.add_done_callback(lambda _: self.inbox.put_nowait(_END))

    async def take(self) -> bytes | None:
        item = await asyncio.wait_for(self.inbox.get(), 30)
        if item is not _END:
            return bytes(item)
        self.task.result()
        return None

    async def failure(self) -> MillraceError:
        with pytest.raises(MillraceError) as failed:
            await asyncio.wait_for(asyncio.shield(self.task), 30)
        return failed.value


@asynccontextmanager
async def talking(*arguments: Any, **options: Any) -> AsyncIterator[Talk]:
    talk = Talk(*arguments, **options)
    try:
        yield talk
    finally:
        talk.task.cancel()
        await asyncio.gather(talk.task, return_exceptions=True)


async def test_messages_of_all_sizes_come_back() -> None:
    async with serving() as (_, _, address), talking(address, "Echo") as talk:
        for size in (1, 16_379, 65_531, 262_139, 5 * 1024 * 1024):
            message = random.Random(size).randbytes(size)
            talk.outbox.put(message)
            assert await talk.take() == message


async def test_nobody_keeps_a_large_message_until_the_next_one() -> None:
    async with serving() as (_, _, address), talking(address, "Echo") as talk:
        talk.outbox.put(b"x")
        assert await talk.take() == b"x"
        # grpc.aio keeps what it has read for the server's handler.
        async with nothing_large_is_kept(but=Path(__file__).name):
            talk.outbox.put(bytes(8 << 20))
            assert len(await talk.take() or b"") == 8 << 20


async def test_messages_come_in_order_and_the_end_after_them() -> None:
    messages = [b"%d" % number * (1 + number % 700) for number in range(1000)]
    async with serving() as (_, _, address), talking(address, "Echo") as talk:
        for message in messages:
            talk.outbox.put(message)
        talk.outbox.close()
        received = []
        while (message := await talk.take()) is not None:
            received.append(message)
    assert received == messages


async def test_a_unix_socket_is_an_address_too(tmp_path: Path) -> None:
    async with serving(f"unix:{tmp_path}/socket") as (_, _, address), talking(address, "Echo") as talk:
        talk.outbox.put(b"x")
        assert await talk.take() == b"x"


async def test_a_refusal_says_everything() -> None:
    async with serving() as (_, _, address), talking(address, "Refuse") as talk:
        talk.outbox.put(b"x")
        error = await talk.failure()
    assert (error.reason, error.field) == (Reason.TEMPLATE_FAILED, "messages")
    assert (error.message, error.metadata) == ("50 % ümlaut\nline", {"at": "3"})


async def test_a_peer_that_refuses_under_a_write_is_no_fault_of_this_side() -> None:
    async with serving() as (_, _, address):
        for _ in range(20):
            async with talking(address, "Refuse") as talk:
                for _ in range(50):
                    talk.outbox.put(b"x" * 10_000)
                # Which of the two: grpc.aio forgets the status where a write fails first.
                assert (await talk.failure()).reason in {Reason.TEMPLATE_FAILED, Reason.ENGINE_UNAVAILABLE}


async def test_an_unexpected_failure_tells_no_secrets() -> None:
    async with serving() as (_, _, address), talking(address, "Break") as talk:
        talk.outbox.put(b"x")
        assert await talk.take() == b"x"
        error = await talk.failure()
    assert error.reason is Reason.INTERNAL
    assert "unexpected" in error.message
    assert "secret" not in error.message


async def test_an_unknown_method_is_unimplemented() -> None:
    async with serving() as (_, _, address), talking(address, "Nothing") as talk:
        assert (await talk.failure()).reason is Reason.ROUTE_NOT_FOUND


async def test_bytes_that_are_no_message_end_the_stream_by_name() -> None:
    async with serving() as (_, _, address), talking(address, "Parse") as talk:
        talk.outbox.put(BytesValue(value=b"fine").SerializeToString())
        assert await talk.take() == b"fine"
        talk.outbox.put(b"\xff\xff\xff")
        error = await talk.failure()
    assert error.reason is Reason.MALFORMED_BODY
    assert f"{SERVICE}/Parse" in error.message


async def test_metadata_and_trace_arrive() -> None:
    metadata = (("x-name", "mill"), ("traceparent", f"00-{'ab' * 16}-{'cd' * 8}-01"))
    async with serving() as (_, _, address), talking(address, "Tell", metadata) as talk:
        assert await talk.take() == b"mill " + b"ab" * 16


async def test_a_call_that_is_cancelled_ends_its_handler() -> None:
    async with serving() as (service, _, address):
        async with talking(address, "Hang") as talk:
            assert await talk.take() == b"begun"
        await asyncio.wait_for(service.cancelled.wait(), 20)


async def test_a_server_that_stops_waits_for_calls_and_then_ends_them() -> None:
    async with serving() as (service, running, address), talking(address, "Hang") as talk:
        assert await talk.take() == b"begun"
        stop = asyncio.create_task(running.stop(20))
        await asyncio.sleep(0)
        service.release.set()
        assert await talk.take() == b"released"
        assert await talk.take() is None
        await asyncio.wait_for(stop, 20)
    async with serving() as (_, running, address), talking(address, "Hang") as talk:
        assert await talk.take() == b"begun"
        await running.stop(0)
        assert (await talk.failure()).reason is Reason.ENGINE_UNAVAILABLE


async def test_what_a_message_breaks_ends_its_call_alone() -> None:
    def refuse(message: bytes) -> None:
        if message == b"domain":
            raise MillraceError(Reason.VOCABULARY_MISMATCH, "other words")
        raise ValueError("a bug")

    async with serving() as (_, _, address), talking(address, "Echo") as other:
        for message, kind in ((b"domain", MillraceError), (b"bug", ValueError)):
            async with talking(address, "Echo", take=refuse) as talk:
                talk.outbox.put(message)
                with pytest.raises(kind):
                    await asyncio.wait_for(asyncio.shield(talk.task), 30)
        other.outbox.put(b"x")
        assert await other.take() == b"x"


async def test_what_cannot_be_joined_ends_the_call() -> None:
    def join(items: list[bytes]) -> bytes:
        raise ValueError("a bug")

    async with serving() as (_, _, address), talking(address, "Echo", join=join) as talk:
        talk.outbox.put(b"x")
        with pytest.raises(ValueError, match="a bug"):
            await asyncio.wait_for(asyncio.shield(talk.task), 30)


async def test_a_stream_that_breaks_while_it_is_stopped_stops() -> None:
    def join(items: list[bytes]) -> bytes:
        talk.task.cancel()
        raise ValueError("a bug")

    async with serving() as (_, _, address):
        talk = Talk(address, "Echo", join=join)
        talk.outbox.put(b"x")
        async with asyncio.timeout(30):
            with pytest.raises(asyncio.CancelledError):
                await talk.task


async def test_nobody_is_told_by_name_and_nothing_counts_as_sent() -> None:
    async with serving() as (_, stopped, address):
        await stopped.stop(0)
        async with talking(address, "Echo") as talk:
            talk.outbox.put(b"x")
            error = await talk.failure()
            assert len(talk.outbox) == 1
    assert error.reason is Reason.ENGINE_UNAVAILABLE
    assert "onnect" in error.message


async def test_a_port_that_is_taken_is_named() -> None:
    async with serving() as (_, _, address):
        with pytest.raises(ConfigError, match=f"cannot listen on {address}"):
            await GrpcServer(address).start()


@asynccontextmanager
async def silenced(address: str) -> AsyncIterator[tuple[str, asyncio.Event, asyncio.Event]]:
    """A way to `address` that can be cut (its connections end) or go silent (nothing comes back)."""
    cut, silent = asyncio.Event(), asyncio.Event()
    host, _, port = address.rpartition(":")
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if not silent.is_set():
                writer.write(data)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        pumps = [
            asyncio.ensure_future(pump(reader, there_writer)),
            asyncio.ensure_future(pump(there_reader, writer)),
        ]
        tasks.update(pumps)
        await cut.wait()
        for each in (writer, there_writer):
            each.transport.abort()

    way = await asyncio.start_server(carry, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{way.sockets[0].getsockname()[1]}", cut, silent
    finally:
        cut.set()
        way.close()
        for each in tasks:
            each.cancel()


async def test_a_peer_that_is_killed_ends_the_call() -> None:
    async with serving() as (service, _, address), silenced(address) as (way, cut, _):
        async with talking(way, "Hang") as talk:
            assert await talk.take() == b"begun"
            cut.set()
            assert (await talk.failure()).reason is Reason.ENGINE_UNAVAILABLE
        await asyncio.wait_for(service.cancelled.wait(), 20)


def with_options(options: tuple[tuple[str, Any], ...], **changed: int) -> tuple[tuple[str, Any], ...]:
    return tuple({**dict(options), **{f"grpc.{name}": value for name, value in changed.items()}}.items())


@pytest.fixture
def quick_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the real ones are, but for the numbers."""
    quick = {
        name: {channels.KEEPALIVE_S * 1000: 50, channels.KEEPALIVE_LIMIT_S * 1000: 200}.get(value, value)
        for name, value in channels.CLIENT_OPTIONS
    }
    monkeypatch.setattr(channels, "CLIENT_OPTIONS", tuple(quick.items()))


@pytest.mark.usefixtures("quick_pings")
async def test_one_call_to_a_peer_that_falls_silent_is_given_up() -> None:
    async with serving() as (_, _, address), silenced(address) as (way, _, silent), connect(way) as channel:
        await channel.channel_ready()
        silent.set()
        make: Any = channel.unary_unary
        with pytest.raises(grpc.aio.AioRpcError) as given_up:
            await make(f"/{SERVICE}/Once")(b"", timeout=120)
    assert given_up.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "ping timeout" in (given_up.value.details() or "").lower()


async def _compute(request: bytes, context: Any) -> bytes:
    """Charges event loop and interpreter, for many times as long as pings may stay without an answer."""
    ends_s = time.monotonic() + 2.0
    while time.monotonic() < ends_s:
        pass
    return b"done"


async def _serve_busy(told: Queue[str]) -> None:
    served = grpc.aio.server(options=channels.SERVER_OPTIONS)
    handlers = {"Once": grpc.unary_unary_rpc_method_handler(_compute)}
    served.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    told.put(f"127.0.0.1:{served.add_insecure_port('127.0.0.1:0')}")
    await served.start()
    await served.wait_for_termination()


def _run_busy(told: Queue[str]) -> None:
    asyncio.run(_serve_busy(told))


@pytest.mark.usefixtures("quick_pings")
async def test_a_peer_that_computes_is_not_given_up() -> None:
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    process = context.Process(target=_run_busy, args=(told,), daemon=True)
    process.start()
    try:
        async with connect(await asyncio.to_thread(told.get)) as channel:
            make: Any = channel.unary_unary
            assert await make(f"/{SERVICE}/Once")(b"", timeout=120, wait_for_ready=True) == b"done"
    finally:
        process.kill()


def test_who_stands_still_is_found_out_within_ten_seconds_and_may_be_asked_so_often() -> None:
    assert channels.KEEPALIVE_S + channels.KEEPALIVE_LIMIT_S < 10
    shortest_ms = dict(channels.SERVER_OPTIONS)["grpc.http2.min_ping_interval_without_data_ms"]
    assert shortest_ms < channels.KEEPALIVE_S * 1000


@pytest.mark.usefixtures("quick_pings")
async def test_a_peer_that_falls_silent_is_given_up() -> None:
    async with (
        serving() as (_, _, address),
        silenced(address) as (way, _, silent),
        talking(way, "Hang") as talk,
    ):
        assert await talk.take() == b"begun"
        silent.set()
        error = await talk.failure()
    assert error.reason is Reason.ENGINE_UNAVAILABLE
    assert "ping timeout" in error.message.lower()


async def test_a_peer_that_says_nothing_is_given_up_and_told() -> None:
    """Its connection is as good as ever."""
    async with serving() as (service, _, address):
        async with talking(address, "Hang", silence_limit_s=0.5) as talk:
            assert await talk.take() == b"begun"
            error = await talk.failure()
        assert error.reason is Reason.ENGINE_UNAVAILABLE
        assert error.message == "it said nothing for 0.5 s"
        await asyncio.wait_for(service.cancelled.wait(), 20)


async def test_a_message_above_the_limit_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    small = with_options(server.SERVER_OPTIONS, max_receive_message_length=1000)
    monkeypatch.setattr(server, "SERVER_OPTIONS", small)
    async with serving() as (_, _, address), talking(address, "Echo") as other:
        async with connect(address) as channel:
            make: Any = channel.stream_stream
            call = make(f"/{SERVICE}/Echo")()
            await call.write(bytes(1000))
            assert len(await call.read()) == 1000
            await call.write(bytes(1001))
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "1001 vs. 1000" in await call.details()
        other.outbox.put(b"x")
        assert await other.take() == b"x"


async def test_a_client_refuses_a_message_above_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    small = with_options(channels.CLIENT_OPTIONS, max_receive_message_length=1000)
    monkeypatch.setattr(channels, "CLIENT_OPTIONS", small)
    async with serving() as (_, _, address), talking(address, "Flood") as talk:
        talk.outbox.put(b"1 1000")
        assert len(await talk.take() or b"") == 1000
        talk.outbox.put(b"1 1001")
        assert "1001 vs. 1000" in (await talk.failure()).message


async def test_a_handler_waits_for_a_client_that_does_not_read() -> None:
    size, num_messages = 128 * 1024, 512
    async with serving() as (service, _, address), connect(address) as channel:
        make: Any = channel.stream_stream
        call = make(f"/{SERVICE}/Flood")()
        await call.write(f"{num_messages} {size}".encode())
        await steady(lambda: service.num_sent)
        # The windows, what the kernel keeps, and what the transports do.
        assert 0 < service.num_sent < num_messages // 2
        for number in range(num_messages):
            assert int.from_bytes((await call.read())[:4], "big") == number


async def test_what_a_server_does_not_read_waits_in_the_outbox() -> None:
    size, num_messages = 128 * 1024, 512
    async with serving() as (_, _, address), talking(address, "Hang") as talk:
        assert await talk.take() == b"begun"
        for _ in range(num_messages):
            talk.outbox.put(bytes(size))
        await steady(lambda: num_messages - len(talk.outbox))
        assert len(talk.outbox) > num_messages // 2
        assert not talk.outbox.is_flushed


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        bytes(range(256)) * 100,
        _PREFACE + b"\xff" * 1000,
        # A header block that no stream begins, and a frame beyond any size.
        _PREFACE + _SETTINGS + bytes([0, 0, 1, 9, 4, 0, 0, 0, 1, 0]),
        _PREFACE + _SETTINGS + bytes([255, 255, 255, 0, 0, 0, 0, 0, 1]) + bytes(1000),
        # More questions than anybody has.
        _PREFACE + _SETTINGS + _PING * 1000,
    ],
    ids=["http1", "noise", "broken frames", "continuation", "huge frame", "pings"],
)
async def test_whoever_does_not_speak_grpc_is_cut_off_and_others_are_not_disturbed(sent: bytes) -> None:
    async with serving() as (_, _, address), talking(address, "Echo") as talk:
        talk.outbox.put(b"before")
        assert await talk.take() == b"before"
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        async with asyncio.timeout(20):
            try:
                while await reader.read(65536):
                    pass
            except ConnectionResetError:
                pass
        writer.close()
        talk.outbox.put(b"after")
        assert await talk.take() == b"after"


async def test_headers_beyond_the_limit_are_refused() -> None:
    async with serving() as (_, _, address):
        long = (("x-name", "x" * 2 * channels.MAX_METADATA_BYTES),)
        async with talking(address, "Tell", long) as talk:
            await talk.failure()
        async with talking(address, "Tell", (("x-name", "x"),)) as talk:
            assert await talk.take() == b"x 0"


async def steady(value: Callable[[], int]) -> None:
    """Returns when the value has not changed for a while."""
    async with asyncio.timeout(30):
        last, num_same = -1, 0
        while num_same < 10:
            await asyncio.sleep(0.02)
            num_same = num_same + 1 if value() == last and last else 0
            last = value()
