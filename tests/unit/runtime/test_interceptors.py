"""The wrapper around every gRPC call, over a real socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from millrace.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from opentelemetry import trace

from contract.errors import MillraceError, Reason
from contract.proto.status import from_rpc_error
from runtime.channels import connect, trace_metadata
from runtime.interceptors import CallInterceptor
from runtime.server import GrpcServer

SERVICE = "millrace.tokenizer.v1.TokenizerService"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


class Tokenizer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Answers with what the wrapper is to translate."""

    async def Tokenize(self, request: Any, context: Any) -> tokenizer_pb2.TokenizeResponse:
        if request.text == "refuse":
            raise MillraceError(
                Reason.CONTEXT_LENGTH_EXCEEDED,
                "5000 tokens; the limit is 4096",
                field="messages",
                metadata={"limit": "4096"},
                retry_after_s=1.5,
            )
        if request.text == "break":
            raise RuntimeError("a secret of the implementation")
        return tokenizer_pb2.TokenizeResponse(token_ids=[1])

    async def GetVocabulary(self, request: Any, context: Any) -> tokenizer_pb2.GetVocabularyResponse:
        span = trace.get_current_span().get_span_context()
        return tokenizer_pb2.GetVocabularyResponse(fingerprint=format(span.trace_id, "032x"))


@pytest.fixture
async def server() -> AsyncIterator[GrpcServer]:
    server = GrpcServer("127.0.0.1:0")
    server.add(tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server, Tokenizer(), SERVICE)
    await server.start()
    yield server
    await server.stop(0)


@pytest.fixture
async def channel(server: GrpcServer) -> AsyncIterator[grpc.aio.Channel]:
    async with connect(f"127.0.0.1:{server.port}") as channel:
        yield channel


async def test_bytes_that_are_no_message_are_refused_by_name(channel: grpc.aio.Channel) -> None:
    call = channel.unary_unary(f"/{SERVICE}/Tokenize")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(b"\xff\xff\xff")
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert from_rpc_error(raised.value).reason is Reason.MALFORMED_BODY


async def test_domain_error_crosses_the_wire_whole(channel: grpc.aio.Channel) -> None:
    stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Tokenize(tokenizer_pb2.TokenizeRequest(text="refuse"))
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    error = from_rpc_error(raised.value)
    assert error.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    assert error.message == "5000 tokens; the limit is 4096"
    assert error.field == "messages"
    assert error.metadata == {"limit": "4096"}
    assert error.retry_after_s == 1.5


async def test_unexpected_failure_keeps_its_secrets(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
    with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Tokenize(tokenizer_pb2.TokenizeRequest(text="break"))
    assert raised.value.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in (raised.value.details() or "")
    assert from_rpc_error(raised.value).reason is Reason.INTERNAL
    assert "a secret of the implementation" in caplog.text


async def test_trace_context_is_current_in_the_handler(channel: grpc.aio.Channel) -> None:
    stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
    answer = await stub.GetVocabulary(
        tokenizer_pb2.GetVocabularyRequest(),
        metadata=(("traceparent", f"00-{TRACE_ID}-b7ad6b7169203331-01"),),
    )
    assert answer.fingerprint == TRACE_ID


async def test_no_trace_context_without_a_span() -> None:
    assert trace_metadata() == ()


async def test_unimplemented_method_is_an_told_by_name(channel: grpc.aio.Channel) -> None:
    stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.ValidateOutput(tokenizer_pb2.ValidateOutputRequest())
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert SERVICE in (raised.value.details() or "")


async def test_health_follows_set_serving_and_can_be_watched(
    server: GrpcServer, channel: grpc.aio.Channel
) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=SERVICE)
    watch = stub.Watch(request)
    updates = aiter(watch)
    assert (await anext(updates)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    await server.set_serving(True)
    assert (await anext(updates)).status == health_pb2.HealthCheckResponse.SERVING
    assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


async def test_abandoned_stream_closes_the_handler_without_noise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    closed = asyncio.Event()

    class Streaming(health_pb2_grpc.HealthServicer):
        async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                while True:
                    yield health_pb2.HealthCheckResponse()
                    await asyncio.sleep(0)
            finally:
                closed.set()

    server = grpc.aio.server(interceptors=[CallInterceptor()])
    health_pb2_grpc.add_HealthServicer_to_server(Streaming(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await anext(aiter(watch))
        watch.cancel()
        async with asyncio.timeout(30):
            await closed.wait()
    await server.stop(0)
    assert "detach" not in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_peer_that_was_gone_when_its_answer_was_written_leaves_no_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = logging.getLogger("grpc._cython.cygrpc")
    # gRPC's own writer of streams logs in this form.
    for failure in (cygrpc.ExecuteBatchError("execute_batch", ()), RuntimeError("another")):
        core.error("raised in core", exc_info=failure)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], RuntimeError)
