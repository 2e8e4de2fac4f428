"""What clients without a key, or in bad faith, make the edge do, it does without the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from millrace.inference.v1 import inference_pb2, inference_pb2_grpc

from benchmarks.neighbour import http2
from contract.errors import Reason
from contract.proto.status import from_status
from runtime.interceptors import ServerInterceptor
from runtime.server import GrpcServer

from .edge import GOOD_KEY, Edge

pytestmark = pytest.mark.asyncio(loop_scope="module")
PUBLIC_PER_SECOND = 5


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def edge(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Edge]:
    limits = {"public_requests_per_second": PUBLIC_PER_SECOND, "request_timeout_s": 0.5}
    edge = Edge(Path(tmp_path_factory.mktemp("edge")), envoy=limits)
    await edge.start()
    yield edge
    await edge.stop()


async def begun(edge: Edge) -> int:
    """Requests that have been sent on to the gateway, health checks left out."""
    async with httpx.AsyncClient() as client:
        stats = (await client.get(f"{edge.admin}/stats?filter=cluster.gateway_.*upstream_rq_total")).text
    return sum(int(line.rpartition(" ")[2]) for line in stats.splitlines())


async def connected(edge: Edge) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = edge.address.split(":")
    return await asyncio.open_connection(host, int(port))


async def test_body_without_a_key_that_never_ends_is_answered_at_once_and_reaches_nobody(edge: Edge) -> None:
    before = await begun(edge)
    reader, writer = await connected(edge)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n400\r\n"
    )
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"MISSING_CREDENTIALS" in answer
    writer.close()
    assert await begun(edge) == before


async def test_body_with_a_key_that_never_ends_is_given_up(edge: Edge) -> None:
    reader, writer = await connected(edge)
    head = f"POST /x HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {GOOD_KEY}\r\ncontent-length: 100\r\n\r\n"
    writer.write(head.encode() + b" ")
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 504")
    assert b"not sent in time" in answer or b"longer than the edge allows" in answer
    writer.close()


async def test_health_is_watched_with_a_key_only(edge: Edge) -> None:
    before = await begun(edge)
    async with grpc.aio.insecure_channel(edge.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Watch(health_pb2.HealthCheckRequest()).read()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await begun(edge) == before
        watch = stub.Watch(
            health_pb2.HealthCheckRequest(), metadata=(("authorization", f"Bearer {GOOD_KEY}"),)
        )
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


async def test_call_without_a_key_has_the_gateways_status(edge: Edge) -> None:
    async with grpc.aio.insecure_channel(edge.address) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Chat(inference_pb2.ChatRequest())
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    status = rpc_status.from_call(refused.value)
    assert status is not None
    assert from_status(status).reason is Reason.MISSING_CREDENTIALS


async def test_what_needs_no_key_is_answered_so_often_a_second(edge: Edge) -> None:
    async with httpx.AsyncClient(base_url=f"http://{edge.address}") as client:
        for _ in itertools.count():
            response = await client.get("/health?a=b")
            if response.status_code != 200:
                break
        assert response.status_code == 429
        assert response.json()["error"]["reason"] == "QUEUE_LIMIT_EXCEEDED"
        assert response.headers["retry-after"] == "1"
        # Who has a key is not asked to wait.
        headers = {"authorization": f"Bearer {GOOD_KEY}"}
        assert (await client.get("/x", headers=headers)).status_code == 200


async def test_streams_that_are_reset_at_once_mostly_reach_nobody(edge: Edge) -> None:
    before = await begun(edge)
    host, port = edge.address.split(":")
    reader, writer = await http2.connected(host, int(port))
    fields = [(":method", "POST"), (":scheme", "http"), (":path", "/x"), (":authority", "a")]
    fields.append(("authorization", f"Bearer {GOOD_KEY}"))
    numbers = range(1, 401, 2)
    writer.write(b"".join(http2.headers(each, fields, ends=True) + http2.reset(each) for each in numbers))
    # Most are reset, so the connection is closed.
    while await reader.read(1 << 16):
        pass
    writer.close()
    assert await begun(edge) - before < len(numbers) / 4


@pytest.mark.parametrize("kind", ["CONTINUATION", "empty DATA"])
async def test_frames_about_nothing_end_the_connection(edge: Edge, kind: str) -> None:
    before = await begun(edge)
    host, port = edge.address.split(":")
    reader, writer = await http2.connected(host, int(port))
    fields = [(":method", "POST"), (":scheme", "http"), (":path", "/x"), (":authority", "a")]
    is_head = kind == "CONTINUATION"
    again = http2.continuation(1, [("x-more", "a" * 1000)]) if is_head else http2.data(1, b"")
    fields.append(("authorization", f"Bearer {GOOD_KEY}"))
    writer.write(http2.headers(1, fields, is_whole=not is_head))
    ended = asyncio.ensure_future(reader.read())
    while not ended.done():
        writer.write(again * 100)
        await asyncio.wait({ended}, timeout=0.01)
    with contextlib.suppress(ConnectionError):
        await ended
    writer.close()
    assert await begun(edge) - before <= (not is_head)


async def test_a_request_may_send_little_before_somebody_takes_it(edge: Edge) -> None:
    host, port = edge.address.split(":")
    reader, writer = await http2.connected(host, int(port))
    stream_bytes = 65_535
    is_told = False
    while not is_told:
        head = await reader.readexactly(9)
        payload = await reader.readexactly(int.from_bytes(head[:3]))
        if head[3] == http2.SETTINGS:
            values = dict(struct.iter_unpack(">HI", payload))
            stream_bytes = values.get(http2.INITIAL_WINDOW_SIZE, stream_bytes)
            is_told = True
    writer.close()
    assert stream_bytes <= 128 * 1024


class Holding(ServerInterceptor):
    """Asks for no message of a call that says so until it is told to, as a gateway without room does."""

    def __init__(self) -> None:
        self.num_held = 0
        self.released = asyncio.Event()

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: Any
    ) -> Any:
        if ("x-held", "yes") in details.invocation_metadata:
            self.num_held += 1
            await self.released.wait()
        return await continuation(details)


async def test_messages_that_nobody_takes_stay_with_their_sender_and_hold_up_no_other(tmp_path: Path) -> None:
    num_held, num_bytes = 40, 1_000_000
    holding = Holding()
    edge = Edge(tmp_path)
    # As a gateway's: windows of messages that nobody has asked for do not grow.
    edge.grpc = GrpcServer("127.0.0.1:0", interceptors=[holding], options=(("grpc.http2.bdp_probe", 0),))
    await edge.start()
    key = ("authorization", f"Bearer {GOOD_KEY}")
    for _ in range(num_held + 1):
        edge.faces.items.put_nowait(None)
    async with grpc.aio.insecure_channel(edge.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.ChatRequest(model="m" * num_bytes)

        async def ask(*metadata: tuple[str, str]) -> None:
            async for _ in stub.Chat(request, metadata=(key, *metadata)):
                pass

        held = [asyncio.create_task(ask(("x-held", "yes"))) for _ in range(num_held)]
        while holding.num_held < num_held:
            await asyncio.sleep(0.01)
        request.model = "m" * 4 * num_bytes
        # On the connection of all the others, each of which has its share of it.
        await asyncio.wait_for(ask(), 60)
        async with httpx.AsyncClient() as client:
            stats = await client.get(
                f"{edge.admin}/stats?filter=cluster.gateway_grpc.http2.pending_send_bytes"
            )
        assert int(stats.text.rpartition(" ")[2]) < num_held * 128 * 1024
        holding.released.set()
        await asyncio.gather(*held)
    await edge.stop()
