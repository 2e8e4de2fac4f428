"""Large messages are counted on the wire before they are parsed, and refused by name."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st
from millrace.common.v1 import chat_pb2
from millrace.inference.v1 import inference_pb2

from benchmarks.neighbour import http2
from contract.errors import MillraceError, Reason
from contract.proto.status import from_rpc_error
from gateway.auth.authorizer import TENANT_HEADER
from gateway.config import RequestConfig
from gateway.faces.grpc import large
from gateway.faces.grpc.servicer import FULL_NAME
from gateway.intake.wire_shape import counted
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import Deployment, deployed, signed_context

METADATA = ((CONTEXT_HEADER, signed_context()),)
LIMITS = {"gateway": {"request": {"max_values": 1000, "max_token_ids": 5000, "max_depth": 20}}}
ROLE = chat_pb2.ROLE_USER


def count(
    message: Message | bytes, kind: Any = inference_pb2.ChatRequest, **limits: int
) -> MillraceError | None:
    data = message if isinstance(message, bytes) else message.SerializeToString()
    try:
        list(counted(data, kind.DESCRIPTOR, RequestConfig(**limits)))
    except MillraceError as error:
        return error
    return None


def conversation(num_messages: int) -> chat_pb2.Conversation:
    return chat_pb2.Conversation(messages=[chat_pb2.Message(role=ROLE, content="hi")] * num_messages)


def test_a_message_within_its_limits_is_counted_to_its_end() -> None:
    request = inference_pb2.ChatRequest(model="m", conversation=conversation(10), metadata={"a": "b"})
    request.conversation.template_options["x"] = [1, {"y": None}]
    request.sampling.temperature = 0.5
    request.sampling.stop_token_ids.extend(range(300))
    assert count(request) is None
    ids = inference_pb2.DetokenizeRequest(model="m", token_ids=range(1000))
    assert count(ids, inference_pb2.DetokenizeRequest, max_token_ids=1000) is None


def test_ids_are_counted_where_they_are_packed() -> None:
    ids = inference_pb2.DetokenizeRequest(token_ids=range(1000))
    error = count(ids, inference_pb2.DetokenizeRequest, max_token_ids=999)
    assert error is not None
    assert (error.field, error.reason) == ("token_ids", Reason.INVALID_ARGUMENT)


@given(st.binary(min_size=1, max_size=60))
def test_garbage_ends_in_a_refusal_by_name_if_it_is_not_a_message(garbage: bytes) -> None:
    error = count(garbage)
    try:
        inference_pb2.ChatRequest.FromString(garbage)
    except DecodeError:
        # The parser looks closer: at texts, and at kinds of values.
        return
    if error is not None:
        assert error.reason is Reason.UNSUPPORTED_FIELD


# Fields of numbers that no version has: a group, one inside another, and a group where a text is known.
@pytest.mark.parametrize("groups", [b"\x73\x74", b"\x73\x7b\x08\x01\x7c\x74", b"\x0b\x12\x01a\x0c"])
def test_groups_of_another_version_are_counted_and_passed(groups: bytes) -> None:
    inference_pb2.ChatRequest.FromString(groups)
    assert count(groups) is None
    error = count(groups, max_values=1) if len(groups) > 2 else count(groups * 2, max_values=1)
    assert error is not None
    assert "does not know" in str(error)


@pytest.mark.parametrize("groups", [b"\x73", b"\x74", b"\x73\x7c", b"\x73\x7b\x74\x7c"])
def test_groups_that_do_not_end_are_malformed(groups: bytes) -> None:
    with pytest.raises(DecodeError):
        inference_pb2.ChatRequest.FromString(groups)
    error = count(groups)
    assert error is not None
    assert error.reason is Reason.MALFORMED_BODY


def test_groups_are_nested_as_deep_as_messages_may_be() -> None:
    error = count(b"\x73" * 50 + b"\x74" * 50, max_depth=20)
    assert error is not None
    assert "nested more than 20 levels deep" in str(error)


def test_a_message_that_breaks_off_is_malformed() -> None:
    wire = inference_pb2.ChatRequest(model="a model", conversation=conversation(2)).SerializeToString()
    error = count(wire[:-1])
    assert error is not None
    assert error.reason is Reason.MALFORMED_BODY


async def refusal(call: Any) -> MillraceError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        async for _ in call:
            pass
    return from_rpc_error(failure.value)


async def refusal_of(stack: Deployment, data: bytes) -> MillraceError:
    call = stack.channel.unary_stream("/millrace.inference.v1.InferenceService/Chat")
    return await refusal(call(data, metadata=METADATA))


def nested(levels: int) -> inference_pb2.ChatRequest:
    request = inference_pb2.ChatRequest(model="tiny", conversation=conversation(1))
    request.conversation.messages[0].content = "a" * 70_000
    inner = request.conversation.template_options
    for _ in range(levels):
        inner = inner.get_or_create_struct("a")
    return request


ATTACKS: dict[str, tuple[bytes, Reason, str]] = {
    "messages": (
        inference_pb2.ChatRequest(conversation=conversation(9000)).SerializeToString(),
        Reason.INVALID_ARGUMENT,
        "conversation.messages",
    ),
    "metadata": (
        inference_pb2.ChatRequest(metadata={f"k{at}": "v" * 20 for at in range(3000)}).SerializeToString(),
        Reason.INVALID_ARGUMENT,
        "metadata",
    ),
    "nesting": (nested(15).SerializeToString(), Reason.INVALID_ARGUMENT, "conversation.template_options"),
    "unknown field without its end": (
        b"\xa2\x7f\xf0\xa2\x04" + b"a" * 70_000 + b"\xa2\x7f\x7f",
        Reason.MALFORMED_BODY,
        "",
    ),
    "unknown fields": (b"\xa0\x7f\x01" * 30_000, Reason.INVALID_ARGUMENT, "the request"),
    "garbage": (b"\xff" * 70_000, Reason.MALFORMED_BODY, ""),
}


@pytest.mark.parametrize(("data", "reason", "field"), ATTACKS.values(), ids=ATTACKS)
async def test_too_much_is_refused_by_its_field_before_it_is_parsed(
    data: bytes, reason: Reason, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = large._Parser.parsed
    assert len(data) > 64 * 1024

    async def never(parser: Any, message: bytes, tenant: str) -> Any:
        result = await parsed(parser, message, tenant)
        pytest.fail(f"it was parsed: {type(result)}")

    monkeypatch.setattr(large._Parser, "parsed", never)
    async with deployed(tables=LIMITS) as stack:
        error = await refusal_of(stack, data)
        assert (error.reason, error.field) == (reason, field)


async def test_a_large_request_that_is_none_too_large_is_answered() -> None:
    async with deployed() as stack:
        text = inference_pb2.TokenizeRequest(model="tiny", text="a" * 100_000)
        # Fields of another version are passed over, here and where protobuf reads them.
        text.MergeFromString(b"\xa0\x7f\x01\xa2\x7f\x03abc" * 2000)
        answer = await stack.inference.Tokenize(text, metadata=METADATA)
        assert len(answer.token_ids) == 100_000
        ids = inference_pb2.DetokenizeRequest(model="tiny", token_ids=[97] * 100_000)
        decoded = await stack.inference.Detokenize(ids, metadata=METADATA)
        assert decoded.text == "a" * 100_000


async def test_packed_messages_are_refused_by_the_name_of_their_packing() -> None:
    async with deployed() as stack:
        call = stack.inference.ListModels(
            inference_pb2.ListModelsRequest(), metadata=METADATA, compression=grpc.Compression.Gzip
        )
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call
        assert "gzip" in (failure.value.details() or "")


async def test_a_message_beyond_the_limit_is_refused_before_it_is_taken() -> None:
    async with deployed(tables={"gateway": {"max_message_bytes": 100_000}}) as stack:
        text = inference_pb2.TokenizeRequest(model="tiny", text="a" * 90_000)
        assert len((await stack.inference.Tokenize(text, metadata=METADATA)).token_ids) == 90_000
        text.text *= 2
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stack.inference.Tokenize(text, metadata=METADATA)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in (refused.value.details() or "")
        assert len(stack.tokenizer.prepared) == 0


async def test_messages_that_never_end_are_asked_for_as_far_as_their_tenants_room_goes() -> None:
    largest = 1024 * 1024
    tables = {"gateway": {"max_message_bytes": largest, "request": {"max_held_bytes": 4 * largest}}}
    async with deployed(tables=tables) as stack:
        reader, writer = await http2.connected("127.0.0.1", stack.gateway.grpc.port)
        fields = [(":method", "POST"), (":scheme", "http"), (":authority", "a")]
        fields += [(":path", f"/{FULL_NAME}/Chat"), ("content-type", "application/grpc"), ("te", "trailers")]
        fields += [(TENANT_HEADER, "acme"), *METADATA]
        begun = http2.grpc_message(b" " * largest)[:20_000]
        for number in (1, 3, 5):
            writer.write(http2.headers(number, fields))
            for at in (0, 10_000):
                writer.write(http2.data(number, begun[at : at + 10_000]))
        # Who is asked to send more.
        asked: set[int] = set()
        while len(asked) < 2:
            head = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(head[:3]))
            if head[3] == http2.WINDOW_UPDATE:
                asked |= {int.from_bytes(head[5:])} - {0}
        assert asked == {1, 3}

        async def tokenized(tenant: str) -> int:
            request = inference_pb2.TokenizeRequest(model="tiny", text="abc")
            answer = await stack.inference.Tokenize(request, metadata=(*METADATA, (TENANT_HEADER, tenant)))
            return len(answer.token_ids)

        behind = asyncio.create_task(tokenized("acme"))
        for _ in range(3):
            assert await tokenized("other") == 3
        assert not behind.done()
        writer.close()
        assert await asyncio.wait_for(behind, 20) == 3
