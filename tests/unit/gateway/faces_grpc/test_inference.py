"""The gRPC face over a real socket: streams, rich errors, deadlines, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from millrace.common.v1 import chat_pb2, output_pb2, sampling_pb2
from millrace.inference.v1 import inference_pb2

from contract.errors import MillraceError
from contract.proto.status import from_rpc_error
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import Deployment, deployed, signed_context
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.vocabulary import encode

METADATA = ((CONTEXT_HEADER, signed_context()),)


def chat(**fields: object) -> inference_pb2.ChatRequest:
    message = chat_pb2.Message(role=chat_pb2.ROLE_USER, content="hi")
    conversation = chat_pb2.Conversation(messages=[message])
    return inference_pb2.ChatRequest(model="tiny", conversation=conversation, **fields)  # type: ignore[arg-type]


async def refusal(stack: Deployment, request: inference_pb2.ChatRequest) -> MillraceError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        async for _ in stack.inference.Chat(request, metadata=METADATA):
            pass
    return from_rpc_error(failure.value)


async def test_chat_streams_and_ends_with_usage() -> None:
    async with deployed() as stack:
        responses = [r async for r in stack.inference.Chat(chat(include_timing=True), metadata=METADATA)]
        text = "".join(choice.content for r in responses for choice in r.choices)
        assert text == "hello 0"
        assert responses[0].request_id == "request-1"
        assert responses[0].service_tier == "standard"
        assert responses[-2].choices[0].finish_reason == output_pb2.FINISH_REASON_STOP
        assert [r.HasField("usage") for r in responses] == [False] * (len(responses) - 1) + [True]
        ttft = responses[-1].usage.ttft
        parts = ttft.queue_s + ttft.preprocess_s + ttft.prefill_s + ttft.first_decode_s
        assert ttft.total_s == pytest.approx(parts + ttft.serialize_s + ttft.network_s)


@pytest.mark.parametrize("tokens_per_step", [1, 3, 64])
@pytest.mark.parametrize("stop", ["", " STOP", "never"])
async def test_generate_tells_every_token_id_up_to_a_stop_string(tokens_per_step: int, stop: str) -> None:
    # Text is held back in the middle of a character, and where a stop string may begin.
    engine = ScriptedEngine(reply=lambda _s, _c: encode("\u20ac STO\u00e9 STOP n\u00ea"))
    engine.tokens_per_step = tokens_per_step
    expected = "\u20ac STO\u00e9 STOP" + ("" if stop == " STOP" else " n\u00ea")
    async with deployed(engine) as stack:
        request = inference_pb2.GenerateRequest(model="tiny", text="hi")
        request.sampling.max_tokens = 60
        request.sampling.stop.extend([stop] if stop else [])
        ids = []
        async for response in stack.inference.Generate(request, metadata=METADATA):
            ids += [id_ for choice in response.choices for id_ in choice.token_ids]
        assert bytes(ids).decode() == expected
        assert response.usage.completion_tokens == len(ids)


async def test_generate_returns_token_ids_and_echoes() -> None:
    async with deployed() as stack:
        request = inference_pb2.GenerateRequest(model="tiny", text="ab", echo=True)
        request.sampling.max_tokens = 5
        request.sampling.logprobs = 0
        responses = [r async for r in stack.inference.Generate(request, metadata=METADATA)]
        choices = [choice for r in responses for choice in r.choices]
        assert "".join(choice.text for choice in choices) == "abhello"
        assert [id_ for choice in choices for id_ in choice.token_ids] == encode("hello")
        assert [each.text for choice in choices for each in choice.logprobs] == list("hello")


async def test_count_and_list() -> None:
    async with deployed() as stack:
        counted = await stack.inference.CountTokens(
            inference_pb2.CountTokensRequest(model="tiny", text="four"), metadata=METADATA
        )
        assert counted.num_tokens == 4
        listed = await stack.inference.ListModels(inference_pb2.ListModelsRequest(), metadata=METADATA)
        assert [model.id for model in listed.models] == ["tiny", "default"]


async def test_fields_at_fault_are_named_in_the_callers_terms() -> None:
    async with deployed() as stack:
        error = await refusal(stack, chat(sampling=sampling_pb2.SamplingOptions(temperature=9.0)))
        assert (error.reason, error.field) == ("INVALID_ARGUMENT", "sampling.temperature")
        error = await refusal(stack, chat(sampling=sampling_pb2.SamplingOptions(max_tokens=5000)))
        assert (error.reason, error.field) == ("CONTEXT_LENGTH_EXCEEDED", "sampling.max_tokens")
        empty = inference_pb2.ChatRequest(model="tiny")
        assert (await refusal(stack, empty)).field == "conversation.messages"
        role = inference_pb2.ChatRequest(
            model="tiny", conversation=chat_pb2.Conversation(messages=[chat_pb2.Message(content="x")])
        )
        assert (await refusal(stack, role)).field == "conversation.messages[0].role"


TOOL = chat_pb2.Tool(name="f")
NOT_ASSISTANT = chat_pb2.Message(
    role=chat_pb2.ROLE_USER, content="x", tool_calls=[chat_pb2.ToolCall(name="f")]
)


def talk(**fields: object) -> inference_pb2.ChatRequest:
    request = chat()
    request.conversation.MergeFrom(chat_pb2.Conversation(**fields))  # type: ignore[arg-type]
    return request


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (chat(metadata={"k" * 65: "v"}), "metadata." + "k" * 64),
        (chat(metadata={"k": "v" * 513}), "metadata.k"),
        (talk(messages=[NOT_ASSISTANT]), "conversation.messages[1].tool_calls"),
        (talk(tool_choice=chat_pb2.ToolChoice(name="f")), "conversation.tool_choice.name"),
        (
            talk(
                tools=[TOOL], tool_choice=chat_pb2.ToolChoice(mode=chat_pb2.TOOL_CHOICE_MODE_AUTO, name="f")
            ),
            "conversation.tool_choice.name",
        ),
        (talk(tools=[TOOL, TOOL]), "conversation.tools[1].name"),
        (chat(response_format=chat_pb2.ResponseFormat(choice=chat_pb2.Choice())), "response_format.choice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_nothing_is_ignored_or_unbounded(request_: inference_pb2.ChatRequest, field: str) -> None:
    async with deployed() as stack:
        error = await refusal(stack, request_)
        assert (error.reason, error.field) == ("INVALID_ARGUMENT", field)
        assert field in error.message


# Field 99, a string, as bytes of the wire.
UNKNOWN = bytes([0x9A, 0x06, 0x01]) + b"a"


@pytest.mark.parametrize(
    "place",
    [
        lambda request: request,
        lambda request: request.sampling,
        lambda request: request.conversation.messages[0],
    ],
    ids=["request", "sampling", "message"],
)
async def test_fields_of_another_version_are_ignored(
    place: Callable[[inference_pb2.ChatRequest], Message],
) -> None:
    request = chat(sampling=sampling_pb2.SamplingOptions(max_tokens=5))
    place(request).MergeFromString(UNKNOWN)
    async with deployed() as stack:
        *_, last = [each async for each in stack.inference.Chat(request, metadata=METADATA)]
        assert last.usage.completion_tokens == 5


async def test_what_is_counted_is_checked_like_what_is_answered() -> None:
    async with deployed() as stack:
        turn = chat_pb2.Message(role=chat_pb2.ROLE_TOOL, content="x")
        request = inference_pb2.CountTokensRequest(model="tiny", conversation={"messages": [turn]})
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stack.inference.CountTokens(request, metadata=METADATA)
        assert from_rpc_error(failure.value).field == "conversation.messages[0].tool_call_id"


async def test_without_context_the_call_is_refused() -> None:
    async with deployed() as stack:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in stack.inference.Chat(chat()):
                pass
        assert failure.value.code() is grpc.StatusCode.UNAUTHENTICATED
        status = rpc_status.from_call(failure.value)
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info)
        assert info.reason == "MISSING_CREDENTIALS"


async def test_deadline_travels_to_the_engine_and_ends_the_call() -> None:
    engine = ScriptedEngine()
    engine.gate.clear()
    async with deployed(engine) as stack:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in stack.inference.Chat(chat(), metadata=METADATA, timeout=0.3):
                pass
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        while not engine.cancels:
            engine.changed.clear()
            await engine.changed.wait()
        assert engine.num_running in (0, 1)


async def test_cancelled_call_releases_the_engine() -> None:
    engine = ScriptedEngine(reply=lambda submit, choice: encode("x") * 4000, step_s=0.005)
    async with deployed(engine) as stack:
        call = stack.inference.Chat(chat(), metadata=METADATA)
        await call.read()
        call.cancel()
        while not engine.cancels or engine.num_running:
            engine.changed.clear()
            await asyncio.wait_for(engine.changed.wait(), 10)
        while stack.gateway.num_open:
            await asyncio.sleep(0.01)


async def test_tokenize_and_detokenize_as_over_http() -> None:
    async with deployed() as stack:
        text = "h\u00e9 the"
        request = inference_pb2.TokenizeRequest(model="default", text=text, include_token_texts=True)
        answer = await stack.inference.Tokenize(request, metadata=METADATA)
        over_http = await stack.http.post("/tokenize", json={"prompt": text, "return_token_strs": True})
        assert list(answer.token_ids) == over_http.json()["tokens"]
        assert list(answer.token_texts) == over_http.json()["token_strs"]
        assert answer.max_model_len == over_http.json()["max_model_len"]
        back = inference_pb2.DetokenizeRequest(model="tiny", token_ids=answer.token_ids)
        assert (await stack.inference.Detokenize(back, metadata=METADATA)).text == text
        conversation = inference_pb2.TokenizeRequest(model="tiny", conversation=chat().conversation)
        assert not (await stack.inference.Tokenize(conversation, metadata=METADATA)).token_texts
        conversation.add_special_tokens = False
        wrong = [
            (stack.inference.Tokenize, conversation, "add_special_tokens"),
            (stack.inference.Tokenize, inference_pb2.TokenizeRequest(model="tiny"), "input"),
            (stack.inference.Tokenize, inference_pb2.TokenizeRequest(model="no", text="a"), "model"),
            (
                stack.inference.Detokenize,
                inference_pb2.DetokenizeRequest(model="tiny", token_ids=[1, 99_999]),
                "token_ids[1]",
            ),
        ]
        for call, message, field in wrong:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await call(message, metadata=METADATA)
            assert from_rpc_error(failure.value).field == field


async def test_best_of_is_answered_at_the_end() -> None:
    async with deployed() as stack:
        request = chat()
        request.sampling.best_of = 3
        responses = [r async for r in stack.inference.Chat(request, metadata=METADATA)]
        assert "".join(choice.content for r in responses for choice in r.choices) == "hello 0"
        assert stack.engines[0].submissions[0].sampling.best_of == 3
