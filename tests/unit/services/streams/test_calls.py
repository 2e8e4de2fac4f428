"""Calls between our clients and servers and gRPC's, in all pairs: nobody can tell which is which."""

from __future__ import annotations

import asyncio
import random

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.errors import ConfigError, MillraceError, Reason
from services.server import GrpcServer
from services.streams import connection as connections
from services.streams.client import open_stream
from services.streams.connection import STREAM_WINDOW
from tests.unit.services.streams.rig import GRPC, LEAN, PAIRS, SERVICE, LeanTalk, serving, talking

pairs = pytest.mark.parametrize(("client", "server"), PAIRS)
# A frame's payload with the message's prefix, a byte less and more; the windows' initial size; many frames.
_SIZES = (0, 1, 16_378, 16_379, 16_380, 65_530, 65_531, 70_000, 262_139, 5 * 1024 * 1024)


@pytest.fixture(autouse=True)
def everybody(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch | None:
    """gRPC's clients get to our server only where they are not told apart."""
    params = getattr(request.node, "callspec", None)
    is_mixed = params is not None and params.params.get("client") == GRPC
    return monkeypatch if is_mixed else None


@pairs
async def test_messages_of_all_sizes_come_back(
    client: str, server: str, everybody: pytest.MonkeyPatch | None
) -> None:
    async with serving(server, everybody) as (_, _, address), talking(client, address, "Echo") as talk:
        for size in _SIZES:
            message = random.Random(size).randbytes(size)
            await talk.send(message)
            assert await talk.take() == message


@pairs
async def test_many_messages_at_once_come_in_order(
    client: str, server: str, everybody: pytest.MonkeyPatch | None
) -> None:
    messages = [str(number).encode() * (number % 700) for number in range(3000)]
    async with serving(server, everybody) as (_, _, address), talking(client, address, "Echo") as talk:

        async def send_all() -> None:
            for message in messages:
                await talk.send(message)
            await talk.end()

        sending = asyncio.create_task(send_all())
        received = []
        while (message := await talk.take()) is not None:
            received.append(message)
        await sending
    assert received == messages


@pairs
async def test_the_client_s_end_is_told_and_answered(
    client: str, server: str, everybody: pytest.MonkeyPatch | None
) -> None:
    async with serving(server, everybody) as (_, _, address), talking(client, address, "Count") as talk:
        await talk.send(b"abc")
        await talk.send(b"")
        await talk.send(b"x" * 100_000)
        await talk.end()
        assert await talk.take() == b"3 100003"
        assert await talk.take() is None


@pairs
async def test_a_refusal_says_everything(
    client: str, server: str, everybody: pytest.MonkeyPatch | None
) -> None:
    async with serving(server, everybody) as (_, _, address), talking(client, address, "Refuse") as talk:
        await talk.send(b"x")
        with pytest.raises(MillraceError) as refused:
            await talk.take()
    error = refused.value
    assert (error.reason, error.field) == (Reason.TEMPLATE_FAILED, "messages")
    assert (error.message, error.metadata) == ("50 % ümlaut\nline", {"at": "3"})


@pairs
async def test_an_unexpected_failure_tells_no_secrets(
    client: str, server: str, everybody: pytest.MonkeyPatch | None
) -> None:
    async with serving(server, everybody) as (_, _, address), talking(client, address, "Break") as talk:
        await talk.send(b"x")
        assert await talk.take() == b"x"
        with pytest.raises(MillraceError, match="unexpected") as failed:
            await talk.take()
    assert failed.value.reason is Reason.INTERNAL
    assert "secret" not in failed.value.message


@pairs
async def test_an_unknown_method_is_unimplemented(
    client: str, server: str, everybody: pytest.MonkeyPatch | None
) -> None:
    async with serving(server, everybody) as (_, _, address), talking(client, address, "Nothing") as talk:
        with pytest.raises(MillraceError) as failed:
            await talk.take()
    assert failed.value.reason is Reason.ROUTE_NOT_FOUND


@pairs
async def test_metadata_and_trace_arrive(
    client: str, server: str, everybody: pytest.MonkeyPatch | None
) -> None:
    metadata = (("x-name", "mill"), ("traceparent", f"00-{'ab' * 16}-{'cd' * 8}-01"))
    async with (
        serving(server, everybody) as (_, _, address),
        talking(client, address, "Tell", metadata) as talk,
    ):
        assert await talk.take() == b"mill " + b"ab" * 16 + b" False"


@pairs
async def test_a_call_that_is_cancelled_ends_its_handler(
    client: str, server: str, everybody: pytest.MonkeyPatch | None
) -> None:
    async with serving(server, everybody) as (service, _, address):
        async with talking(client, address, "Hang") as talk:
            assert await talk.take() == b"begun"
        await asyncio.wait_for(service.cancelled.wait(), 20)
        await asyncio.wait_for(service.done.wait(), 20)


@pairs
async def test_a_server_that_stops_waits_for_calls_and_then_ends_them(
    client: str, server: str, everybody: pytest.MonkeyPatch | None
) -> None:
    async with (
        serving(server, everybody) as (service, stopping, address),
        talking(client, address, "Hang") as first,
        talking(client, address, "Hang") as second,
    ):
        assert await first.take() == await second.take() == b"begun"
        stop = asyncio.create_task(stopping.stop(20))
        await asyncio.sleep(0)
        service.release.set()
        for talk in (first, second):
            assert await talk.take() == b"released"
            assert await talk.take() is None
        await asyncio.wait_for(stop, 20)
    async with serving(server, everybody) as (_, other, address), talking(client, address, "Hang") as talk:
        assert await talk.take() == b"begun"
        await other.stop(0)
        with pytest.raises(MillraceError) as ended:
            await talk.take()
    assert ended.value.reason in (Reason.ENGINE_UNAVAILABLE, Reason.CANCELLED)


@pytest.mark.parametrize("server", [LEAN, GRPC])
async def test_a_deadline_is_kept(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(server, monkeypatch) as (service, _, address):
        async with talking(GRPC, address, "Tell", limit_s=30) as talk:
            assert (await talk.take()).endswith(b"True")
        async with talking(GRPC, address, "Hang", limit_s=1.0) as talk:
            assert await talk.take() == b"begun"
            with pytest.raises(MillraceError) as late:
                await talk.take()
        assert late.value.reason is Reason.DEADLINE_EXCEEDED
        await asyncio.wait_for(service.done.wait(), 20)


async def test_our_server_keeps_a_deadline_that_its_client_forgets() -> None:
    async with serving(LEAN) as (service, _, address):
        async with talking(LEAN, address, "Hang", (("grpc-timeout", "200m"),)) as talk:
            assert await talk.take() == b"begun"
            with pytest.raises(MillraceError) as late:
                await talk.take()
        assert late.value.reason is Reason.DEADLINE_EXCEEDED
        await asyncio.wait_for(service.cancelled.wait(), 20)


@pytest.mark.parametrize("server", [LEAN, GRPC])
async def test_nobody_is_told_by_name(server: str) -> None:
    async with serving(server) as (_, stopped, address):
        await stopped.stop(0)
        with pytest.raises(MillraceError, match="failed to connect") as failed:
            await LeanTalk().open(address, "Echo", ())
    assert failed.value.reason is Reason.ENGINE_UNAVAILABLE
    with pytest.raises(MillraceError, match="is not host:port"):
        await LeanTalk().open("nowhere", "Echo", ())


async def test_a_server_that_is_killed_ends_the_call() -> None:
    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"SM\r\n\r\n")
        writer.transport.abort()

    silent = await asyncio.start_server(hear, "127.0.0.1", 0)
    async with silent, talking(LEAN, f"127.0.0.1:{silent.sockets[0].getsockname()[1]}", "Echo") as talk:
        with pytest.raises(MillraceError) as lost:
            await talk.take()
    assert lost.value.reason is Reason.ENGINE_UNAVAILABLE


async def test_a_peer_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEEPALIVE_S", 0.05)
    monkeypatch.setattr(connections, "KEEPALIVE_LIMIT_S", 0.05)
    gone = asyncio.Event()

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            pass
        gone.set()
        writer.close()

    silent = await asyncio.start_server(hear, "127.0.0.1", 0)
    async with silent, talking(LEAN, f"127.0.0.1:{silent.sockets[0].getsockname()[1]}", "Echo") as talk:
        with pytest.raises(MillraceError, match="has not answered"):
            await talk.take()
        await asyncio.wait_for(gone.wait(), 20)


async def test_a_peer_that_answers_pings_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEEPALIVE_S", 0.02)
    monkeypatch.setattr(connections, "KEEPALIVE_LIMIT_S", 5.0)
    async with serving(GRPC) as (_, _, address), talking(LEAN, address, "Echo") as talk:
        # Of no use but to let some pings pass.
        await asyncio.sleep(0.2)
        await talk.send(b"still here")
        assert await talk.take() == b"still here"


async def test_a_sender_waits_for_a_client_that_does_not_read() -> None:
    size, num_messages = 128 * 1024, 512
    async with serving(LEAN) as (service, _, address), talking(LEAN, address, "Flood") as talk:
        transport = talk.stream._connection._transport
        transport.pause_reading()
        await talk.send(f"{num_messages} {size}".encode())
        await _steady(lambda: service.num_sent)
        # The window, what the kernel keeps, and what the transport does.
        assert 0 < service.num_sent < STREAM_WINDOW // size + 128
        transport.resume_reading()
        for number in range(num_messages):
            message = await talk.take()
            assert message is not None
            assert int.from_bytes(message[:4], "big") == number


async def test_a_client_is_told_when_there_is_room_again() -> None:
    async with serving(LEAN) as (_, _, address), talking(LEAN, address, "Hang") as talk:
        assert await talk.take() == b"begun"
        assert not talk.stream.is_congested
        # The handler does not read.
        while not talk.stream.is_congested:
            talk.stream.send(bytes(100_000))
            await asyncio.sleep(0)
    async with serving(LEAN) as (_, _, address), talking(LEAN, address, "Count") as talk:
        while not talk.stream.is_congested:
            talk.stream.send(bytes(100_000))
        await asyncio.wait_for(talk.room.wait(), 30)
        assert not talk.stream.is_congested


@pytest.mark.parametrize("server", [LEAN, GRPC])
async def test_a_client_refuses_a_message_that_is_too_large(server: str) -> None:
    async with (
        serving(server) as (_, _, address),
        talking(LEAN, address, "Flood", max_message_bytes=1000) as talk,
    ):
        await talk.send(b"1 1000")
        assert len(await talk.take() or b"") == 1000
        await talk.send(b"1 1001")
        with pytest.raises(MillraceError, match="larger than the limit of 1000"):
            await talk.take()


async def test_a_handler_may_pass_messages_on_without_its_task() -> None:
    async with serving(LEAN) as (_, _, address), talking(LEAN, address, "Direct") as talk:
        for number in range(50):
            await talk.send(b"%d" % number)
        assert await talk.take() == b"first 0"
        # Those that came before it asked, and those after.
        for number in range(1, 50):
            assert await talk.take() == b"direct %d" % number
        await talk.end()
        assert await talk.take() == b"end"
        assert await talk.take() is None


async def test_everything_else_of_the_server_is_grpc_s_own() -> None:
    async with serving(LEAN) as (_, _, address), grpc.aio.insecure_channel(address) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=SERVICE)
        )
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = [
            each
            async for each in reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                iter([ask])
            )
        ]
        assert SERVICE in [each.name for each in answer.list_services_response.service]
        async with talking(GRPC, address, "Echo") as talk:
            await talk.send(b"x" * 3_000_000)
            assert await talk.take() == b"x" * 3_000_000


async def test_a_port_that_is_taken_is_named() -> None:
    async with serving(LEAN) as (_, _, address):
        second = GrpcServer(address, streams=True)
        with pytest.raises(ConfigError, match=f"cannot listen on {address}"):
            await second.start()


async def test_what_a_message_breaks_ends_its_call_alone() -> None:
    ends: list[MillraceError | None] = []

    def refuse(message: bytes) -> None:
        if message == b"domain":
            raise MillraceError(Reason.VOCABULARY_MISMATCH, "other words")
        raise ValueError("secret")

    async with serving(LEAN) as (_, _, address):
        for message in (b"domain", b"bug"):
            stream = await open_stream(
                address, f"/{SERVICE}/Echo", on_message=refuse, on_end=ends.append, metadata=()
            )
            stream.send(message)
            await _until(lambda: len(ends) > 0)
            (error,) = ends
            ends.clear()
            assert error is not None
            wanted = Reason.VOCABULARY_MISMATCH if message == b"domain" else Reason.INTERNAL
            assert error.reason is wanted
            assert "secret" not in error.message


async def _until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def _steady(value: object) -> None:
    """Returns when the value has not changed for a while."""
    assert callable(value)
    async with asyncio.timeout(30):
        last, num_same = None, 0
        while num_same < 10:
            await asyncio.sleep(0.02)
            num_same = num_same + 1 if value() == last and last else 0
            last = value()
