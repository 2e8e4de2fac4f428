"""Prepare calls on one stream of the running service: answers, refusals, and what is told of them."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from millrace.common.v1 import chat_pb2
from millrace.tokenizer.v1 import tokenizer_pb2

from contract.errors import MillraceError, Reason
from contract.proto.status import from_detail, from_rpc_error
from gateway.tokenizer.stream import PrepareStreams
from observability.emit import names
from tests.unit.tokenizer_svc.families import make
from tests.unit.tokenizer_svc.running import Service, limited_service, signed, user
from tests.unit.tokenizer_svc.schemas import slow_schema


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen_tools", tmp_path_factory.mktemp("stream"))


@pytest.fixture(scope="module")
def service(path: Path) -> Iterator[Service]:
    with limited_service(path) as running:
        yield running


def test_one_stream_answers_many_calls_by_their_ids(service: Service) -> None:
    call = tokenizer_pb2.PrepareCall
    request = tokenizer_pb2.PrepareRequest
    schema = chat_pb2.ResponseFormat(json_schema=chat_pb2.JsonSchema(schema_json='{"type": "boolean"}'))
    calls = [
        call(id=7, request=request(context=signed(), conversation=user("Hello"))),
        call(id=8, request=request(text="unsigned")),
        call(id=9, request=request(context=signed(), text="Hi", response_format=schema)),
        call(id=10, request=request(context=signed(), model="gpt", text="x")),
    ]
    more = [call(id=11, request=request(context=signed(), text="later"))]
    messages = [tokenizer_pb2.PrepareStreamRequest(calls=each) for each in (calls, more)]
    found = {
        answer.id: answer
        for message in service.stub.PrepareStream(iter(messages), timeout=60)
        for answer in message.answers
    }
    assert sorted(found) == [7, 8, 9, 10, 11]
    unary = service.stub.Prepare(calls[0].request)
    assert found[7].response.token_ids == unary.token_ids
    assert found[7].response.vocabulary_fingerprint == unary.vocabulary_fingerprint
    assert from_detail(found[8].error).reason is Reason.CONTEXT_SIGNATURE_INVALID
    assert found[9].response.grammar.payload
    assert (found[10].error.reason, found[10].error.field) == ("MODEL_NOT_FOUND", "model")
    assert (
        found[11].response.token_ids
        == service.stub.Tokenize(tokenizer_pb2.TokenizeRequest(text="later")).token_ids
    )


def test_a_call_without_time_is_told_so(service: Service) -> None:
    form = chat_pb2.ResponseFormat(regex="(.*a.{60}){40}")
    request = tokenizer_pb2.PrepareRequest(context=signed(), text="x", response_format=form)
    call = tokenizer_pb2.PrepareCall(id=1, request=request, timeout_s=1e-6)
    messages = iter([tokenizer_pb2.PrepareStreamRequest(calls=[call])])
    (message,) = service.stub.PrepareStream(messages, timeout=60)
    error = from_detail(message.answers[0].error)
    assert error.reason is Reason.DEADLINE_EXCEEDED
    assert "grammar" in error.message


SHORT_AND_OTHER = [
    user("Hello, how are you?"),
    user("Spells <|im_start|>system and é, 漢字, <think>"),
    user("What ends in the beginning of one <|im_st"),
    user("long " * 1500),
    user(""),
    chat_pb2.Conversation(),
    chat_pb2.Conversation(
        messages=[
            chat_pb2.Message(role=chat_pb2.ROLE_SYSTEM, content="Be short."),
            chat_pb2.Message(role=chat_pb2.ROLE_USER, content="Well?", name="somebody"),
        ]
    ),
    chat_pb2.Conversation(
        messages=[chat_pb2.Message(role=chat_pb2.ROLE_USER, content="Call it.")],
        tools=[chat_pb2.Tool(name="call_it", parameters_json='{"type": "object"}')],
        tool_choice=chat_pb2.ToolChoice(mode=chat_pb2.TOOL_CHOICE_MODE_REQUIRED),
    ),
    chat_pb2.Conversation(
        messages=[chat_pb2.Message(role=chat_pb2.ROLE_USER, content="Call nothing.")],
        tool_choice=chat_pb2.ToolChoice(mode=chat_pb2.TOOL_CHOICE_MODE_REQUIRED),
    ),
    chat_pb2.Conversation(
        messages=[chat_pb2.Message(role=chat_pb2.ROLE_ASSISTANT, content="It goes on")],
        continue_final_message=True,
    ),
]


@pytest.mark.parametrize("number", range(len(SHORT_AND_OTHER)))
@pytest.mark.parametrize("max_prompt_tokens", [None, 4])
async def test_a_stream_answers_like_a_call_of_its_own(
    service: Service, number: int, max_prompt_tokens: int | None
) -> None:
    """What is short is answered on the stream where it is read; a call of its own goes the way of all."""
    request = tokenizer_pb2.PrepareRequest(
        context=signed(), conversation=SHORT_AND_OTHER[number], max_prompt_tokens=max_prompt_tokens
    )
    expected: tokenizer_pb2.PrepareResponse | MillraceError
    try:
        expected = service.stub.Prepare(request)
    except grpc.RpcError as error:
        expected = from_rpc_error(error)
    streams = PrepareStreams(service.target)
    found: tokenizer_pb2.PrepareResponse | MillraceError
    try:
        found = await streams.call(request.SerializeToString(), "", "", 60.0)
    except MillraceError as error:
        found = error
    finally:
        await streams.close()
    call = tokenizer_pb2.PrepareCall(id=1, request=request, timeout_s=60)
    (message,) = service.stub.PrepareStream(iter([tokenizer_pb2.PrepareStreamRequest(calls=[call])]))
    (by_grpc,) = message.answers
    if isinstance(expected, MillraceError):
        assert isinstance(found, MillraceError)
        for refusal in (found, from_detail(by_grpc.error)):
            assert (refusal.reason, refusal.message, refusal.field) == (
                expected.reason,
                expected.message,
                expected.field,
            )
        return
    assert isinstance(found, tokenizer_pb2.PrepareResponse)
    for answer in (expected, found, by_grpc.response):
        assert answer.timings.render_s > 0
        assert answer.timings.encode_s > 0
        answer.ClearField("timings")
        answer.grammar_cached = False
    assert found == expected == by_grpc.response


async def test_what_is_answered_at_once_is_counted(service: Service) -> None:
    def counts() -> dict[str, float]:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        return {
            key: float(value)
            for key, _, value in (line.rpartition(" ") for line in lines)
            if key.startswith((f"{names.TOKENIZER_STAGE_SECONDS.name}_count", names.PROMPT_LENGTH.name))
        }

    address = service.ready.rpartition("metrics=")[2].strip()
    request = tokenizer_pb2.PrepareRequest(context=signed(), conversation=user("Counted."))
    service.stub.Prepare(request)
    before = counts()
    service.stub.Prepare(request)
    between = counts()
    streams = PrepareStreams(service.target)
    await streams.call(request.SerializeToString(), "", "", 60.0)
    await streams.close()
    grown = {key: value - before[key] for key, value in between.items()}
    assert any(grown.values())
    while {key: value - between[key] for key, value in counts().items()} != grown:
        await asyncio.sleep(0.01)


async def test_calls_that_are_taken_back_hold_up_nothing_that_their_tenant_asks_for_next(path: Path) -> None:
    """Nothing else ends what has begun: it has an hour, and far more memory than it fills until then."""
    running = Service(
        path,
        MILLRACE_TOKENIZER__COMPILE__TIME_LIMIT_S="3600",
        MILLRACE_TOKENIZER__COMPILE__MEMORY_LIMIT_BYTES=str(8 << 30),
    )
    streams = PrepareStreams(running.target)

    async def asked(schema: str) -> tokenizer_pb2.PrepareResponse:
        form = chat_pb2.ResponseFormat(json_schema=chat_pb2.JsonSchema(schema_json=schema, strict=False))
        request = tokenizer_pb2.PrepareRequest(context=signed(), text="x", response_format=form)
        return await streams.call(request.SerializeToString(), "", "", 120.0)

    try:
        left = [asyncio.ensure_future(asked(slow_schema(number))) for number in range(8)]
        # The service has read them once it has answered what was sent after them.
        await streams.call(
            tokenizer_pb2.PrepareRequest(context=signed(), text="Hi").SerializeToString(), "", "", 60.0
        )
        for each in left:
            each.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        assert (await asked('{"type": "boolean"}')).grammar.payload
    finally:
        await streams.close()
        assert running.stop() == 0
