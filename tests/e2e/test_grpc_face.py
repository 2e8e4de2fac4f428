"""The gRPC face through Envoy, with generated stubs."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from millrace.common.v1 import chat_pb2, output_pb2, sampling_pb2
from millrace.inference.v1 import inference_pb2, inference_pb2_grpc

from contract.errors import ERROR_DOMAIN, Reason
from contract.proto.status import from_rpc_error
from tests.e2e.stack import CONCURRENT_KEY, LIMIT_S, LIMITED_GRPC_KEY, Stack

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


def details_of(error: grpc.RpcError) -> dict[str, object]:
    """The messages in a rich status, by their names."""
    status = rpc_status.from_call(error)
    assert status is not None
    known = (error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo, error_details_pb2.BadRequest)
    found: dict[str, object] = {}
    for packed in status.details:
        for kind in known:
            message = kind()
            if packed.Unpack(message):
                found[kind.__name__] = message
    return found


def test_limits_say_when_to_come_back(stack: Stack, stub: Stub) -> None:
    # Envoy refuses for requests a minute, the gateway for streams: both in the same form.
    for _ in range(3):
        call = stub.Chat(chat_request(stack), metadata=stack.metadata(LIMITED_GRPC_KEY), timeout=LIMIT_S)
        try:
            list(call)
        except grpc.RpcError as error:
            refused = error
    assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    details = details_of(refused)
    assert details["ErrorInfo"].reason == Reason.REQUEST_RATE_EXCEEDED
    assert 0 < details["RetryInfo"].retry_delay.ToSeconds() <= 60
    long = chat_request(stack, "Tell me a long story.")
    long.sampling.max_tokens = 3000
    long.sampling.ignore_eos = True
    first = stub.Chat(long, metadata=stack.metadata(CONCURRENT_KEY), timeout=LIMIT_S)
    next(first)
    with pytest.raises(grpc.RpcError) as raised:
        list(stub.Chat(chat_request(stack), metadata=stack.metadata(CONCURRENT_KEY), timeout=LIMIT_S))
    first.cancel()
    details = details_of(raised.value)
    assert details["ErrorInfo"].reason == Reason.CONCURRENCY_EXCEEDED
    assert details["ErrorInfo"].domain == ERROR_DOMAIN
    assert details["RetryInfo"].retry_delay.ToNanoseconds() > 0


@pytest.mark.parametrize("option", ["n", "best_of", "beam_width"])
def test_more_branches_than_streams_are_refused_for_good(stack: Stack, stub: Stub, option: str) -> None:
    request = chat_request(stack)
    setattr(request.sampling, option, 2)
    with pytest.raises(grpc.RpcError) as raised:
        list(stub.Chat(request, metadata=stack.metadata(CONCURRENT_KEY), timeout=LIMIT_S))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = details_of(raised.value)
    assert details["BadRequest"].field_violations[0].field == f"sampling.{option}"
    assert "RetryInfo" not in details


def test_unknown_method_is_unimplemented(stack: Stack) -> None:
    with stack.channel() as channel:
        call = channel.unary_unary("/millrace.engine.v1.EngineService/CheckInvariants")
        with pytest.raises(grpc.RpcError) as raised:
            call(b"", metadata=stack.metadata(), timeout=LIMIT_S)
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_reflection_describes_what_clients_may_call(stack: Stack) -> None:
    with stack.channel() as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)

        def ask(**request: str) -> reflection_pb2.ServerReflectionResponse:
            asked = iter([reflection_pb2.ServerReflectionRequest(**request)])
            return next(stub.ServerReflectionInfo(asked, metadata=stack.metadata(), timeout=LIMIT_S))

        names = {service.name for service in ask(list_services="").list_services_response.service}
        assert {"millrace.inference.v1.InferenceService", "grpc.health.v1.Health"} <= names
        described = ask(file_containing_symbol="millrace.inference.v1.InferenceService")
        assert described.file_descriptor_response.file_descriptor_proto


def test_health_through_the_edge(stack: Stack) -> None:
    with stack.channel() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "millrace.inference.v1.InferenceService"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=LIMIT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as raised:
            stub.Check(health_pb2.HealthCheckRequest(service="no.such.Service"), timeout=LIMIT_S)
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
