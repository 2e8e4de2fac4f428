"""Requests and answers as bytes.

What is large is neither parsed nor written by the process that everybody shares: of a large request only the
small fields are read, the rest goes to a worker as it came, and token ids come back as they will be sent. The
twins of messages in millrace.tokenizer.internal hold as bytes what is not to be looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
import msgspec
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from millrace.common.v1 import chat_pb2, context_pb2, grammar_pb2
from millrace.tokenizer.internal.v1 import unparsed_pb2
from millrace.tokenizer.v1 import tokenizer_pb2

from contract.chat import Conversation, JsonSchemaFormat, LeftOut, ResponseFormat
from contract.efforts import EFFORT
from contract.errors import MillraceError, Reason
from contract.pooling import PooledModel
from contract.proto import chat
from contract.proto.grammar import grammar_fields, report_message
from contract.vocabulary import DecoderKind
from tokenizer_svc.grammar.request import PreparedRequest, Prompted
from tokenizer_svc.text.checkpoint import Checkpoint
from tokenizer_svc.types import LengthLimit, Truncation

_SERVICE = tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"]
SERVICE_NAME: str = _SERVICE.full_name

# Requests up to this size are parsed as they come, in a tenth of a millisecond.
MAX_PARSED_BYTES = 256 * 1024
# Fields that only a worker parses, from the whole request.
_CONTENT = ("conversation", "text", "encoded", "texts", "response_format")
# Before the bytes of a field: its tag and their number.
_MAX_FRAMING_BYTES = 5
# A message of a stream has fewer calls; each is work for Python before it can be refused.
MAX_CALLS = 4096

# The refusal of bytes that are no PrepareRequest.
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


class WireCall(msgspec.Struct, frozen=True):
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


class TakenBack(msgspec.Struct, frozen=True):
    """A call without a request: whoever sent the one of the same id waits for it no longer."""

    id: int


# One of the calls in a message.
StreamCall = WireCall | UnreadableCall | TakenBack


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
    # Parsers accept views as well, which their types do not say.
    parse: Any = tokenizer_pb2.PrepareRequest.FromString
    request: tokenizer_pb2.PrepareRequest = parse(wire)
    return request


def read_calls(wire: bytes) -> list[StreamCall]:
    """The calls of a PrepareStreamRequest, requests parsed unless they are large. Raises DecodeError."""
    if len(wire) <= MAX_PARSED_BYTES:
        try:
            calls = tokenizer_pb2.PrepareStreamRequest.FromString(wire).calls
        except DecodeError:
            # It may be one request of many: the others are answered.
            pass
        else:
            _check_num_calls(len(calls))
            return [
                WireCall(call, call.request) if call.HasField("request") else TakenBack(call.id)
                for call in calls
            ]
    twins = unparsed_pb2.UnparsedCalls.FromString(wire).calls
    _check_num_calls(len(twins))
    return [_call(twin) for twin in twins]


def _check_num_calls(num_calls: int) -> None:
    if num_calls > MAX_CALLS:
        raise DecodeError(f"there are more than {MAX_CALLS} calls")


def _call(twin: unparsed_pb2.UnparsedCall) -> StreamCall:
    wire = twin.request
    if not wire:
        return TakenBack(twin.id)
    twin.ClearField("request")
    try:
        return WireCall(twin, read_prepare(wire))
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
    # Where a field occurs twice, the twin has the last, and a worker's parser merges all: so every byte that
    # is in no known field counts as input.
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


# Wire messages to domain types and back. Nothing else in this package but the servicer sees protos.

_DECODERS = {kind: tokenizer_pb2.DecoderKind.Value(f"DECODER_KIND_{kind.name}") for kind in DecoderKind}


def conversation(message: chat_pb2.Conversation, *, max_tool_bytes: int) -> Conversation:
    """Raises INVALID_ARGUMENT for unknown roles, and GRAMMAR_REFUSED when the schemas of strict tools and the
    grammars are larger than `max_tool_bytes` together.
    """
    _check_tool_bytes(message.tools, max_tool_bytes)
    return chat.conversation(message)


def _check_tool_bytes(tools: Iterable[chat_pb2.Tool], limit: int) -> None:
    size = 0
    for index, tool in enumerate(tools):
        size += len(tool.parameters_json) * tool.strict + len(tool.input_grammar)
        if size > limit:
            raise MillraceError(
                Reason.GRAMMAR_REFUSED,
                f"the schemas of strict tools have more than {limit} bytes together: use smaller ones",
                field=f"tools[{index}].function.parameters",
            )


def response_format(message: chat_pb2.ResponseFormat) -> ResponseFormat | None:
    """The format, or None when none is set. Its name says nothing about the grammar."""
    form = chat.response_format(message)
    return msgspec.structs.replace(form, name="") if isinstance(form, JsonSchemaFormat) else form


_TRUNCATIONS = {
    tokenizer_pb2.TRUNCATION_KEEP_END: Truncation.KEEP_END,
    tokenizer_pb2.TRUNCATION_KEEP_START: Truncation.KEEP_START,
}


def length_limit(
    request: tokenizer_pb2.PrepareRequest | tokenizer_pb2.TokenizeRequest, who: context_pb2.RequestContext
) -> LengthLimit:
    """The lowest limit that the request and its context state."""
    limits = [request.max_prompt_tokens] if request.HasField("max_prompt_tokens") else []
    if who.HasField("max_context_tokens"):
        limits.append(who.max_context_tokens)
    truncation = _TRUNCATIONS.get(request.truncation, Truncation.REFUSE)
    return LengthLimit(min(limits) if limits else None, truncation)


def prepare_answer(
    prepared: PreparedRequest, fingerprint: str
) -> tokenizer_pb2.PrepareResponse | LargeAnswer:
    """The answer to Prepare; serialized where its ids are."""
    ids = prepared.prompt.token_ids
    fields = short_answer(prepared.prompt, fingerprint)
    if isinstance(ids, memoryview):
        del fields["token_ids"]
    fields["timings"]["compile_s"] = prepared.compile_s
    response = tokenizer_pb2.PrepareResponse(grammar_cached=prepared.grammar_cached, **fields)
    if prepared.compiled is not None:
        artifact: Any = grammar_fields(prepared.compiled.artifact)
        response.grammar.CopyFrom(grammar_pb2.GrammarArtifact(**artifact))
        if prepared.compiled.enforcement is not None:
            response.enforcement.CopyFrom(report_message(prepared.compiled.enforcement))
    return LargeAnswer((ids, response.SerializeToString())) if isinstance(ids, memoryview) else response


def tokens(prompted: Prompted) -> tokenizer_pb2.TokenizeResponse | LargeAnswer:
    """The answer to Tokenize; serialized where its ids are."""
    ids = prompted.token_ids
    left_out = _left_out(prompted.left_out)
    if isinstance(ids, memoryview):
        # Packed ids are the first field.
        return LargeAnswer((ids, tokenizer_pb2.TokenizeResponse(**left_out).SerializeToString()))
    return tokenizer_pb2.TokenizeResponse(token_ids=ids, **left_out)


def _left_out(found: LeftOut | None) -> dict[str, Any]:
    if found is None:
        return {}
    return {
        "num_truncated_tokens": found.num_tokens,
        "num_truncated_turns": found.num_turns,
        "num_turns": found.of_turns,
    }


def short_answer(prompted: Prompted, fingerprint: str) -> dict[str, Any]:
    """The fields of an answer without a grammar."""
    return {
        "token_ids": prompted.token_ids,
        "vocabulary_fingerprint": fingerprint,
        "assistant_prefix": prompted.assistant_prefix,
        "texts": [msgspec.structs.asdict(each) for each in prompted.texts],
        **_left_out(prompted.left_out),
        "timings": {"render_s": prompted.render_s, "encode_s": prompted.encode_s},
    }


def vocabulary_response(checkpoint: Checkpoint) -> tokenizer_pb2.GetVocabularyResponse:
    """The answer to GetVocabulary."""
    vocabulary = checkpoint.vocabulary
    return tokenizer_pb2.GetVocabularyResponse(
        fingerprint=vocabulary.fingerprint,
        decoder=_DECODERS[vocabulary.decoder],
        tokens=vocabulary.tokens,
        special_ids=vocabulary.special_ids,
        byte_token_ids=sorted(vocabulary.byte_ids),
        eos_token_ids=checkpoint.eos_token_ids,
        bos_token_id=checkpoint.bos_token_id,
        tool_call_format=checkpoint.tool_call_format,
        reasoning_format=checkpoint.reasoning_format,
        generation_config_json=checkpoint.generation_config_json,
        sampling_sources=checkpoint.sampling_sources,
        pooled=None if checkpoint.pooled is None else _pooled(checkpoint.pooled),
        takes_effort=any(EFFORT in source for source in checkpoint.templates.values()),
    )


def _pooled(found: PooledModel) -> tokenizer_pb2.PooledModel:
    return tokenizer_pb2.PooledModel(**msgspec.structs.asdict(found))
