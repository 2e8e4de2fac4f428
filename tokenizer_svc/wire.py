"""Requests and answers as bytes.

What is large is neither parsed nor written by the process that everybody shares: of a large request only the
small fields are read, the rest goes to a worker as it came, and token ids come back as they will be sent. Nor
is it copied more often than it must be: parts of messages are views of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import msgspec
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from millrace.tokenizer.v1 import tokenizer_pb2

from services.streams.messages import Pieces, takes_pieces

_SERVICE = tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"]
SERVICE_NAME: str = _SERVICE.full_name

# Requests up to this size are parsed as they come, in a tenth of a millisecond.
MAX_PARSED_BYTES = 256 * 1024
_REQUEST = tokenizer_pb2.PrepareRequest.DESCRIPTOR
_INPUTS = {field.number: field.name for field in _REQUEST.oneofs_by_name["input"].fields}
_FORMAT = _REQUEST.fields_by_name["response_format"].number
# A request has fewer, and a message of a stream fewer calls; each costs Python a microsecond.
_MAX_FIELDS = 64
_MAX_CALLS = 4096
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_CALLS = tokenizer_pb2.PrepareStreamRequest.DESCRIPTOR.fields_by_name["calls"].number
_CALL_REQUEST = tokenizer_pb2.PrepareCall.DESCRIPTOR.fields_by_name["request"].number
_ANSWERS = tokenizer_pb2.PrepareStreamResponse.DESCRIPTOR.fields_by_name["answers"].number
_RESPONSE = tokenizer_pb2.PrepareAnswer.DESCRIPTOR.fields_by_name["response"].number


# Serialized messages whose slices are no copies.
Wire = memoryview | Pieces


class LargeRequest(msgspec.Struct, frozen=True):
    """A PrepareRequest that a worker will parse."""

    # Its small fields: all but input and response format.
    head: tokenizer_pb2.PrepareRequest
    wire: Wire
    # Field and bytes of the input ("" when there is none), bytes of the response format.
    input: str
    num_input_bytes: int
    num_format_bytes: int


class Call(msgspec.Struct, frozen=True):
    """One call of a stream, like PrepareCall."""

    head: tokenizer_pb2.PrepareCall
    request: tokenizer_pb2.PrepareRequest | LargeRequest

    @property
    def id(self) -> int:
        """See PrepareCall."""
        return self.head.id


class LargeAnswer(msgspec.Struct, frozen=True):
    """A PrepareResponse that is serialized already: its parts in their order."""

    parts: tuple[bytes | memoryview, ...]


def read_prepare(wire: bytes | Wire) -> tokenizer_pb2.PrepareRequest | LargeRequest:
    """The request, parsed unless it is large. Raises DecodeError."""
    if len(wire) > MAX_PARSED_BYTES:
        return large(wire)
    return tokenizer_pb2.PrepareRequest.FromString(bytes(wire))


@takes_pieces
def read_calls(wire: bytes | Pieces) -> list[Call]:
    """The calls of a PrepareStreamRequest, requests parsed unless they are large. Raises DecodeError."""
    if len(wire) <= MAX_PARSED_BYTES:
        calls = tokenizer_pb2.PrepareStreamRequest.FromString(bytes(wire)).calls
        return [Call(call, call.request) for call in calls]
    view = memoryview(wire) if isinstance(wire, bytes) else wire
    return [
        _call(view[content:end])
        for number, _, content, end in _fields(view, _MAX_CALLS)
        # Others are of no version that is known here.
        if number == _CALLS
    ]


def _call(wire: Wire) -> Call:
    head: list[bytes] = []
    request: Wire | None = None
    for number, begin, content, end in _fields(wire):
        if number != _CALL_REQUEST:
            head.append(bytes(wire[begin:end]))
        elif request is None:
            request = wire[content:end]
        else:
            raise DecodeError("a call has two requests")
    return Call(tokenizer_pb2.PrepareCall.FromString(b"".join(head)), read_prepare(request or b""))


def large(whole: bytes | Wire) -> LargeRequest:
    """A serialized PrepareRequest in parts. Raises DecodeError where it is none, or has a field twice."""
    wire = memoryview(whole) if isinstance(whole, bytes) else whole
    head: list[bytes] = []
    sizes: dict[int, int] = {}
    for number, begin, content, end in _fields(wire):
        if number in sizes:
            raise DecodeError(f"field {number} occurs twice")
        sizes[number] = end - content
        if number not in _INPUTS and number != _FORMAT:
            head.append(bytes(wire[begin:end]))
    (name, num_bytes), *others = [
        (name, sizes[number]) for number, name in _INPUTS.items() if number in sizes
    ] or [("", 0)]
    if others:
        raise DecodeError("there is more than one input")
    parsed = tokenizer_pb2.PrepareRequest.FromString(b"".join(head))
    return LargeRequest(parsed, wire, name, num_bytes, sizes.get(_FORMAT, 0))


def _fields(wire: Wire, max_fields: int = _MAX_FIELDS) -> Iterator[tuple[int, int, int, int]]:
    """Number, beginning, beginning of the content, and end of each field; contents are not looked at."""
    position = 0
    # One turn more, to see that nothing follows.
    for _ in range(max_fields + 1):
        if position == len(wire):
            return
        begin = position
        key, position = _varint(wire, position)
        content, kind = position, key & 7
        if kind == _VARINT:
            _, position = _varint(wire, position)
        elif kind == _LENGTH:
            length, content = _varint(wire, position)
            position = content + length
        elif kind in (_FIXED64, _FIXED32):
            position += 8 if kind == _FIXED64 else 4
        else:
            raise DecodeError(f"there is no wire type {kind}")
        if position > len(wire):
            raise DecodeError("a field is cut off")
        yield key >> 3, begin, content, position
    raise DecodeError(f"there are more than {max_fields} fields")


def _varint(wire: Wire, position: int) -> tuple[int, int]:
    """The number, and where it ends."""
    value = 0
    for index, byte in enumerate(bytes(wire[position : position + _MAX_VARINT_BYTES])):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    raise DecodeError("a number is cut off")


def packed_ids(token_ids: list[int]) -> bytes:
    """Token ids as the first field of PrepareResponse, TokenizeResponse and EncodedPrompt."""
    return tokenizer_pb2.EncodedPrompt(ids=token_ids).SerializeToString()


def stream_answer(number: int, answer: LargeAnswer) -> bytes:
    """A PrepareStreamResponse with one answer, to the call of this number."""
    head = tokenizer_pb2.PrepareAnswer(id=number).SerializeToString()
    head += _begin(_RESPONSE, sum(map(len, answer.parts)))
    size = len(head) + sum(map(len, answer.parts))
    return b"".join((_begin(_ANSWERS, size), head, *answer.parts))


def _begin(field: int, size: int) -> bytes:
    """What stands before a field's content of so many bytes."""
    written = bytearray([field << 3 | _LENGTH])
    while size > 0x7F:
        written.append(size & 0x7F | 0x80)
        size >>= 7
    written.append(size)
    return bytes(written)


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
