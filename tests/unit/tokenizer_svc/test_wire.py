"""Large requests in parts, and what counts as large."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing

import msgspec
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from millrace.common.v1 import chat_pb2, context_pb2
from millrace.tokenizer.internal.v1 import unparsed_pb2
from millrace.tokenizer.v1 import tokenizer_pb2

from contract.errors import MillraceError, Reason
from tokenizer_svc.config import BUNDLED_CHECKPOINT, PromptLimitsConfig
from tokenizer_svc.grammar.request import PromptRequest
from tokenizer_svc.messages.wire import (
    MAX_CALLS,
    MAX_PARSED_BYTES,
    LargeAnswer,
    LargeRequest,
    UnreadableCall,
    WireCall,
    large,
    large_answer,
    packed_ids,
    read_calls,
    read_prepare,
    small_answer,
    stream_response,
)
from tokenizer_svc.prompt.limits import is_large
from tokenizer_svc.prompt.prompts import Prompts
from tokenizer_svc.text.checkpoint import load_checkpoint
from tokenizer_svc.types import LengthLimit
from tokenizer_svc.workers.fork_server import Replies

REQUEST = tokenizer_pb2.PrepareRequest
CONTEXT = context_pb2.SignedContext(payload=b"p" * 300, signature=b"s")


def chat(*contents: str) -> chat_pb2.Conversation:
    return chat_pb2.Conversation(
        messages=[chat_pb2.Message(role=chat_pb2.ROLE_USER, content=content) for content in contents]
    )


@pytest.mark.parametrize(
    ("given_input", "name"),
    [
        ({"conversation": chat("x" * 300, "y")}, "conversation"),
        ({"text": "x" * 300}, "text"),
        ({"encoded": tokenizer_pb2.EncodedPrompt(ids=[1, 1000] * 200)}, "encoded"),
        ({}, ""),
    ],
)
def test_all_but_input_and_format_is_read(given_input: dict[str, object], name: str) -> None:
    form = chat_pb2.ResponseFormat(regex="a" * 1000)
    small = {"context": CONTEXT, "model": "m", "max_prompt_tokens": 77, "truncation": 1}
    wire = REQUEST(response_format=form, **small, **given_input).SerializeToString()
    found = large(wire)
    assert found.head == REQUEST(**small)
    assert (found.wire, found.input) == (wire, name)
    value = next(iter(given_input.values()), "")
    # A string's field holds its bytes, a message's what it is serialized to.
    assert found.num_input_bytes == (len(value) if isinstance(value, str) else value.ByteSize())  # type: ignore[attr-defined]
    assert found.num_format_bytes == form.ByteSize()


def test_only_large_requests_come_in_parts() -> None:
    small = REQUEST(text="x" * 1000)
    assert read_prepare(small.SerializeToString()) == small
    assert isinstance(read_prepare(REQUEST(text="x" * MAX_PARSED_BYTES).SerializeToString()), LargeRequest)


@pytest.mark.parametrize(
    "wire",
    [
        REQUEST(text="a" * 500).SerializeToString()[:-1],
        b"\x22\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x07",
        # A name that is no text.
        b"\x12\x01\xff",
    ],
)
def test_what_is_no_request_is_malformed(wire: bytes) -> None:
    with pytest.raises(DecodeError):
        large(wire)


@pytest.mark.parametrize("field", ["conversation", "text", "encoded", "response_format"])
def test_of_what_occurs_twice_all_bytes_count(field: str) -> None:
    """A worker's parser joins messages that occur twice, so a limit must not look at the last alone."""
    contents = {
        "conversation": chat("x" * 300),
        "text": "x" * 300,
        "encoded": tokenizer_pb2.EncodedPrompt(ids=[1000] * 200),
        "response_format": chat_pb2.ResponseFormat(regex="x" * 300),
    }
    once = REQUEST(**{field: contents[field]}).SerializeToString()  # type: ignore[arg-type]
    tail = REQUEST(conversation=chat("b")).SerializeToString()
    found = large(once * 50 + tail)
    assert found.input == "conversation"
    assert found.num_input_bytes + found.num_format_bytes >= 49 * len(once) - 10
    # Whatever comes last is the input, as everywhere in protobuf.
    assert large(tail + REQUEST(text="bc").SerializeToString()).input == "text"


def test_a_conversation_in_many_parts_is_refused_like_one_of_their_size() -> None:
    part = REQUEST(conversation=chat("x" * 1_000_000)).SerializeToString()
    config = PromptLimitsConfig()
    limits = Prompts(load_checkpoint(BUNDLED_CHECKPOINT), config, turn_cache_tokens=0).limits
    request = large(part * 40)
    with pytest.raises(MillraceError) as refused:
        limits.large(request.input, request.num_input_bytes, request.num_format_bytes, LengthLimit())
    assert refused.value.reason is Reason.REQUEST_TOO_LARGE


@given(wire=st.binary(max_size=200))
def test_any_bytes_are_taken_or_refused(wire: bytes) -> None:
    try:
        found = large(wire)
    except DecodeError:
        return
    assert found.num_input_bytes + found.num_format_bytes <= len(wire)


def test_ids_are_packed_as_all_answers_have_them() -> None:
    packed = packed_ids([1, 300, 70_000])
    for kind in (
        tokenizer_pb2.PrepareResponse,
        tokenizer_pb2.TokenizeResponse,
    ):
        assert list(kind.FromString(packed).token_ids) == [1, 300, 70_000]
    rest = tokenizer_pb2.PrepareResponse(assistant_prefix="a").SerializeToString()
    both = tokenizer_pb2.PrepareResponse.FromString(packed + rest)
    assert (list(both.token_ids), both.assistant_prefix) == ([1, 300, 70_000], "a")


def call_of(number: int, text: str) -> tokenizer_pb2.PrepareCall:
    return tokenizer_pb2.PrepareCall(
        id=number, request=REQUEST(model="m", text=text), traceparent="a", tracestate="b", timeout_s=1.5
    )


def calls_in(wire: bytes) -> list[WireCall]:
    found = read_calls(wire)
    assert all(isinstance(each, WireCall) for each in found)
    return [each for each in found if isinstance(each, WireCall)]


def test_calls_of_a_stream_are_the_same_however_large_their_message_is() -> None:
    calls = [call_of(1, "x" * 100), call_of(2, "y" * MAX_PARSED_BYTES), call_of(3, "z")]
    small = calls_in(tokenizer_pb2.PrepareStreamRequest(calls=calls[::2]).SerializeToString())
    assert [(each.id, each.request) for each in small] == [(each.id, each.request) for each in calls[::2]]
    whole = tokenizer_pb2.PrepareStreamRequest(calls=calls).SerializeToString()
    found = calls_in(whole)
    assert [each.id for each in found] == [1, 2, 3]
    assert (found[0].request, found[2].request) == (calls[0].request, calls[2].request)
    for each in found:
        assert (each.head.traceparent, each.head.tracestate, each.head.timeout_s) == ("a", "b", 1.5)
    assert isinstance(found[1].request, LargeRequest)
    assert found[1].request.wire == calls[1].request.SerializeToString()
    # Spans that are told of later keep the head alone.
    assert found[1].head.ByteSize() < 100
    for broken in (whole[:-1], whole[: len(whole) // 2], whole + b"\x0a\x05"):
        with pytest.raises(DecodeError):
            read_calls(broken)


@pytest.mark.parametrize("size", [100, MAX_PARSED_BYTES])
def test_a_request_that_is_none_leaves_the_other_calls_readable(size: int) -> None:
    good = call_of(1, "x" * size)
    # Wire type 7 does not exist.
    bad = unparsed_pb2.UnparsedCall(id=2, request=b"\x07")
    answered, refused = read_calls(
        tokenizer_pb2.PrepareStreamRequest(calls=[good]).SerializeToString()
        + unparsed_pb2.UnparsedCalls(calls=[bad]).SerializeToString()
    )
    assert isinstance(answered, WireCall)
    assert answered.id == 1
    assert refused == UnreadableCall(2)


@pytest.mark.parametrize("padding", [0, MAX_PARSED_BYTES])
def test_calls_of_a_message_are_bounded(padding: int) -> None:
    rest = tokenizer_pb2.PrepareStreamRequest(calls=[call_of(1, "x" * padding)]).SerializeToString()
    empty = b"\x0a\x00"
    assert len(read_calls(rest + empty * (MAX_CALLS - 1))) == MAX_CALLS
    with pytest.raises(DecodeError):
        read_calls(rest + empty * MAX_CALLS)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 20_000])
def test_large_answers_are_written_as_they_would_be_serialized(size: int) -> None:
    ids = tokenizer_pb2.PrepareResponse(token_ids=range(size)).SerializeToString()
    rest = tokenizer_pb2.PrepareResponse(assistant_prefix="a").SerializeToString()
    answers = [
        large_answer(300, LargeAnswer((memoryview(ids), rest))),
        small_answer(2, response={"token_ids": [1]}),
    ]
    message = tokenizer_pb2.PrepareStreamResponse.FromString(stream_response(answers))
    response = tokenizer_pb2.PrepareResponse(token_ids=range(size), assistant_prefix="a")
    assert list(message.answers) == [
        tokenizer_pb2.PrepareAnswer(id=300, response=response),
        tokenizer_pb2.PrepareAnswer(id=2, response={"token_ids": [1]}),
    ]


def test_a_workers_prompt_is_the_same_in_parts() -> None:
    request = PromptRequest(tenant="a")
    encoded = request.encoded(b"x" * 300 + b"y", "prompt")
    found = msgspec.msgpack.decode(b"".join(encoded.payload), type=PromptRequest)
    assert (encoded.field, found.tenant, bytes(found.wire)) == ("prompt", "a", b"x" * 300 + b"y")


def test_many_small_parts_are_large_as_well() -> None:
    assert not is_large(REQUEST(conversation=chat(*["hello"] * 100)))
    # It may be written several times.
    assert is_large(REQUEST(conversation=chat(*["hello"] * 100), truncation=1))
    assert is_large(REQUEST(conversation=chat(*["hello"] * 1000)))
    tools = chat("hello")
    for each in range(100):
        tools.tools.add(name=f"f{each}")
    assert is_large(REQUEST(conversation=tools))
    assert not is_large(REQUEST(conversation=chat("word " * 20_000)))
    assert is_large(REQUEST(conversation=chat("<|x|> " * 20_000)))
    assert is_large(REQUEST(encoded=tokenizer_pb2.EncodedPrompt(ids=range(40_000))))
    assert not is_large(REQUEST(encoded=tokenizer_pb2.EncodedPrompt(ids=range(10_000))))
    assert is_large(REQUEST(text="x", response_format=chat_pb2.ResponseFormat(lark="x" * 40_000)))
    assert not is_large(REQUEST(text="x", response_format=chat_pb2.ResponseFormat(lark="x" * 20_000)))


async def test_replies_are_told_apart_however_they_arrive() -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()
    transport, replies = await loop.create_connection(Replies, sock=ours)
    with closing(transport):
        for reply in (b"", b"x", b"y" * 3_000_000):
            waiting = replies.next()
            frame = len(reply).to_bytes(4, "little") + reply
            for part in (frame[:2], frame[2:5], frame[5:]):
                await loop.sock_sendall(theirs, part)
            assert await waiting == reply
        waiting = replies.next()
        await loop.sock_sendall(theirs, b"\x09\x00\x00\x00half")
        theirs.close()
        with pytest.raises(EOFError):
            await waiting
        with pytest.raises(EOFError):
            await replies.next()
