"""The gRPC face through Envoy, with generated stubs."""

from __future__ import annotations

import grpc
import pytest
from millrace.common.v1 import chat_pb2, output_pb2, sampling_pb2
from millrace.inference.v1 import inference_pb2, inference_pb2_grpc

from services.errors import Reason
from services.status import from_rpc_error
from tests.e2e.stack import LIMIT_S, Stack

Stub = inference_pb2_grpc.InferenceServiceStub


def conversation(text: str) -> chat_pb2.Conversation:
    return chat_pb2.Conversation(messages=[chat_pb2.Message(role=chat_pb2.ROLE_USER, content=text)])


def chat_request(stack: Stack, text: str = "Hello!", **options: object) -> inference_pb2.ChatRequest:
    sampling = sampling_pb2.SamplingOptions(temperature=0.0, max_tokens=16)
    request = inference_pb2.ChatRequest(model=stack.model, conversation=conversation(text), sampling=sampling)
    request.MergeFrom(inference_pb2.ChatRequest(**options))
    return request


def reason_of(call: object) -> Reason:
    with pytest.raises(grpc.RpcError) as raised:
        list(call)  # type: ignore[call-overload]
    return from_rpc_error(raised.value).reason


def test_chat_streams_and_ends_with_usage(stack: Stack, stub: Stub) -> None:
    responses = list(
        stub.Chat(chat_request(stack, include_timing=True), metadata=stack.metadata(), timeout=LIMIT_S)
    )
    assert len({response.request_id for response in responses}) == 1
    finishes = [choice.finish_reason for response in responses for choice in response.choices]
    assert finishes[-1] in {output_pb2.FINISH_REASON_STOP, output_pb2.FINISH_REASON_LENGTH}
    assert not any(finishes[:-1])
    assert [response.HasField("usage") for response in responses].count(True) == 1
    usage = responses[-1].usage
    assert usage.prompt_tokens > 0
    parts = usage.ttft
    total_s = (
        parts.queue_s
        + parts.preprocess_s
        + parts.prefill_s
        + parts.first_decode_s
        + parts.serialize_s
        + parts.network_s
    )
    assert total_s == pytest.approx(parts.total_s, rel=0.01, abs=0.002)


def test_generate_from_text_and_from_token_ids(stack: Stack, stub: Stub) -> None:
    sampling = sampling_pb2.SamplingOptions(temperature=0.0, max_tokens=8)
    for prompt in ({"text": "Once upon"}, {"token_ids": inference_pb2.TokenIds(ids=[300, 301])}):
        request = inference_pb2.GenerateRequest(model=stack.model, sampling=sampling, **prompt)
        responses = list(stub.Generate(request, metadata=stack.metadata(), timeout=LIMIT_S))
        assert responses[-1].usage.completion_tokens > 0
        ids = [token for r in responses for choice in r.choices for token in choice.token_ids]
        assert len(ids) == responses[-1].usage.completion_tokens


def test_both_faces_give_the_same_answer(stack: Stack, stub: Stub) -> None:
    responses = stub.Chat(chat_request(stack), metadata=stack.metadata(), timeout=LIMIT_S)
    text = "".join(choice.content for response in responses for choice in response.choices)
    with stack.openai() as client:
        answer = client.chat.completions.create(
            model=stack.model,
            messages=[{"role": "user", "content": "Hello!"}],
            max_tokens=16,
            temperature=0,
        )
    assert text == answer.choices[0].message.content


def test_count_tokens_agrees_with_usage(stack: Stack, stub: Stub) -> None:
    request = inference_pb2.CountTokensRequest(model=stack.model, conversation=conversation("Hello!"))
    counted = stub.CountTokens(request, metadata=stack.metadata(), timeout=LIMIT_S).num_tokens
    responses = list(stub.Chat(chat_request(stack), metadata=stack.metadata(), timeout=LIMIT_S))
    assert responses[-1].usage.prompt_tokens == counted


def test_models_have_their_context_length(stack: Stack, stub: Stub) -> None:
    answer = stub.ListModels(inference_pb2.ListModelsRequest(), metadata=stack.metadata(), timeout=LIMIT_S)
    found = {model.id: model for model in answer.models}
    assert found[stack.model].max_model_len > 0


def test_bad_key_is_unauthenticated(stack: Stack, stub: Stub) -> None:
    call = stub.Chat(chat_request(stack), metadata=stack.metadata("mr-wrong"), timeout=LIMIT_S)
    with pytest.raises(grpc.RpcError) as raised:
        list(call)
    assert raised.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_refusals_carry_reason_and_field(stack: Stack, stub: Stub) -> None:
    def call(request: inference_pb2.ChatRequest) -> object:
        return stub.Chat(request, metadata=stack.metadata(), timeout=LIMIT_S)

    unknown = chat_request(stack)
    unknown.model = "no-such-model"
    assert reason_of(call(unknown)) is Reason.MODEL_NOT_FOUND
    too_long = chat_request(stack, "word " * 60_000)
    assert reason_of(call(too_long)) in {Reason.CONTEXT_LENGTH_EXCEEDED, Reason.NEVER_FITS}
    bad = chat_request(stack)
    bad.sampling.temperature = -1.0
    with pytest.raises(grpc.RpcError) as raised:
        list(call(bad))  # type: ignore[call-overload]
    error = from_rpc_error(raised.value)
    assert error.reason is Reason.INVALID_ARGUMENT
    assert "temperature" in error.field


def test_cancelled_call_frees_everything(stack: Stack, stub: Stub) -> None:
    request = chat_request(stack, "Tell me a long story.")
    request.sampling.max_tokens = 2000
    request.sampling.ignore_eos = True
    call = stub.Chat(request, metadata=stack.metadata(), timeout=LIMIT_S)
    next(iter(call))
    call.cancel()
    # The fixture checks that no request, state or block stays behind.


def test_deadline_of_the_caller_ends_the_request(stack: Stack, stub: Stub) -> None:
    request = chat_request(stack, "Tell me a long story.")
    request.sampling.max_tokens = 3000
    request.sampling.ignore_eos = True
    try:
        list(stub.Chat(request, metadata=stack.metadata(), timeout=1.0))
        outcome = grpc.StatusCode.OK
    except grpc.RpcError as error:
        outcome = error.code()
    # A machine that generates 3000 tokens in a second is right, too.
    assert outcome in {grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED}
