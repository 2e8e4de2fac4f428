"""Requests and answers as bytes.

What is large is neither parsed nor written by the process that everybody shares: of a large request only the
small fields are read, the rest goes to a worker as it came, and token ids come back as they will be sent. The
twins of messages in millrace.tokenizer.internal hold as bytes what is not to be looked at.
"""

from __future__ import annotations

from typing import Any

import grpc
import msgspec
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from millrace.tokenizer.internal.v1 import unparsed_pb2
from millrace.tokenizer.v1 import tokenizer_pb2

_SERVICE = tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"]
SERVICE_NAME: str = _SERVICE.full_name

# Requests up to this size are parsed as they come, in a tenth of a millisecond.
MAX_PARSED_BYTES = 256 * 1024
# What a worker reads from the whole.
_CONTENT = ("conversation", "text", "encoded", "response_format")
# Before the bytes of a field: its tag and their number.
_MAX_FRAMING_BYTES = 5
# A message of a stream has fewer calls; each is work for Python before it can be refused.
MAX_CALLS = 4096

# What is said of other bytes.
NO_REQUEST = "the bytes of the request are no message that Prepare takes; generate the client from proto/"

Head = tokenizer_pb2.PrepareCall | unparsed_pb2.UnparsedCall


class LargeRequest(msgspec.Struct, frozen=True):
    """A PrepareRequest that a worker will parse."""

    # Its small fields: all but input and response format.
    head: tokenizer_pb2.PrepareRequest
    wire: bytes
    # Field and bytes of the input ("" when there is none), bytes of the response format.
    input: str
    num_input_bytes: int
    num_format_bytes: int


class Call(msgspec.Struct, frozen=True):
    """One call of a stream: PrepareCall or its twin, and what it asks for."""

    head: Head
    request: tokenizer_pb2.PrepareRequest | LargeRequest

    @property
    def id(self) -> int:
        """See PrepareCall."""
        return self.head.id

    @property
    def num_bytes(self) -> int:
        """On the wire, about."""
        return len(self.request.wire) if isinstance(self.request, LargeRequest) else self.head.ByteSize()


class UnreadableCall(msgspec.Struct, frozen=True):
    """One whose request is no message that Prepare takes."""

    id: int


class LargeAnswer(msgspec.Struct, frozen=True):
    """A PrepareResponse that is serialized already: its parts in their order."""

    parts: tuple[bytes | memoryview, ...]


def read_prepare(wire: bytes) -> tokenizer_pb2.PrepareRequest | LargeRequest:
    """The request, parsed unless it is large. Raises DecodeError."""
    if len(wire) > MAX_PARSED_BYTES:
        return large(wire)
    return tokenizer_pb2.PrepareRequest.FromString(wire)


def parse_request(wire: memoryview) -> tokenizer_pb2.PrepareRequest:
    """The request, however large. Raises DecodeError."""
    # Parsers take views as well, which their types do not say.
    parse: Any = tokenizer_pb2.PrepareRequest.FromString
    request: tokenizer_pb2.PrepareRequest = parse(wire)
    return request


def read_calls(wire: bytes) -> list[Call | UnreadableCall]:
    """The calls of a PrepareStreamRequest, requests parsed unless they are large. Raises DecodeError."""
    if len(wire) <= MAX_PARSED_BYTES:
        try:
            calls = tokenizer_pb2.PrepareStreamRequest.FromString(wire).calls
        except DecodeError:
            # It may be one request of many: the others are answered.
            pass
        else:
            _check_num_calls(len(calls))
            return [Call(call, call.request) for call in calls]
    twins = unparsed_pb2.UnparsedCalls.FromString(wire).calls
    _check_num_calls(len(twins))
    return [_call(twin) for twin in twins]


def _check_num_calls(num_calls: int) -> None:
    if num_calls > MAX_CALLS:
        raise DecodeError(f"there are more than {MAX_CALLS} calls")


def _call(twin: unparsed_pb2.UnparsedCall) -> Call | UnreadableCall:
    wire = twin.request
    twin.ClearField("request")
    try:
        return Call(twin, read_prepare(wire))
    except DecodeError:
        return UnreadableCall(twin.id)


def large(wire: bytes) -> LargeRequest:
    """A serialized PrepareRequest in parts. Raises DecodeError where it is none."""
    twin = unparsed_pb2.UnparsedRequest.FromString(wire)
    name = twin.WhichOneof("input") or ""
    sizes = {each: len(getattr(twin, each)) for each in (name, "response_format") if each}
    for each in _CONTENT:
        twin.ClearField(each)  # type: ignore[arg-type]
    small = twin.SerializeToString()
    # Of a field that occurs twice the twin has the last, and a worker's parser all: every byte that is not
    # accounted for counts as input.
    known = len(small) + sum(_MAX_FRAMING_BYTES + size for size in sizes.values())
    return LargeRequest(
        head=tokenizer_pb2.PrepareRequest.FromString(small),
        wire=wire,
        input=name,
        num_input_bytes=sizes.get(name, 0) + max(0, len(wire) - known),
        num_format_bytes=sizes["response_format"],
    )


def packed_ids(token_ids: list[int]) -> bytes:
    """Token ids as the first field of PrepareResponse, TokenizeResponse and EncodedPrompt."""
    return tokenizer_pb2.EncodedPrompt(ids=token_ids).SerializeToString()


def small_answer(number: int, **outcome: Any) -> bytes:
    """A PrepareAnswer to the call of this number, from its fields."""
    return tokenizer_pb2.PrepareAnswer(id=number, **outcome).SerializeToString()


def large_answer(number: int, answer: LargeAnswer) -> bytes:
    """The same with a response that is serialized."""
    return unparsed_pb2.UnparsedAnswer(id=number, response=b"".join(answer.parts)).SerializeToString()


def stream_response(answers: list[bytes]) -> bytes:
    """A PrepareStreamResponse of serialized answers."""
    return unparsed_pb2.UnparsedAnswers(answers=answers).SerializeToString()


def add_to_server(servicer: Any, server: grpc.aio.Server) -> None:
    """Registers the service like the generated function, except that handlers of Prepare may get a
    LargeRequest, those of PrepareStream get lists of calls, and that answers may be bytes.
    """
    handlers = {}
    for method in _SERVICE.methods:
        parse: Any = GetMessageClass(method.input_type).FromString
        make: Any = grpc.unary_unary_rpc_method_handler
        if method.server_streaming:
            make, parse = grpc.stream_stream_rpc_method_handler, read_calls
        if method.name == "Prepare":
            parse = read_prepare
        handlers[method.name] = make(
            getattr(servicer, method.name), request_deserializer=parse, response_serializer=_written
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))


def _written(answer: Message | LargeAnswer | bytes) -> bytes:
    if isinstance(answer, LargeAnswer):
        return b"".join(answer.parts)
    return answer if isinstance(answer, bytes) else answer.SerializeToString()
