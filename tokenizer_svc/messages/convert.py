"""Wire messages to domain types and back. Nothing else in this package but the servicer sees protos."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from millrace.common.v1 import chat_pb2, context_pb2, grammar_pb2
from millrace.tokenizer.v1 import tokenizer_pb2

from contract.chat import Conversation, JsonSchemaFormat, ResponseFormat
from contract.errors import MillraceError, Reason
from contract.proto import chat
from contract.proto.grammar import grammar_fields, report_message
from contract.vocabulary import DecoderKind
from tokenizer_svc.grammar.request import Prepared, Prompted
from tokenizer_svc.messages.wire import LargeAnswer
from tokenizer_svc.text.checkpoint import Checkpoint
from tokenizer_svc.types import LengthLimit, Truncation

_DECODERS = {kind: tokenizer_pb2.DecoderKind.Value(f"DECODER_KIND_{kind.name}") for kind in DecoderKind}


def conversation(message: chat_pb2.Conversation, *, max_tool_bytes: int) -> Conversation:
    """Raises INVALID_ARGUMENT for unknown roles, and GRAMMAR_REFUSED when the tools' schemas are larger than
    `max_tool_bytes` together.
    """
    _check_tool_bytes(message.tools, max_tool_bytes)
    return chat.conversation(message)


def _check_tool_bytes(tools: Iterable[chat_pb2.Tool], limit: int) -> None:
    size = 0
    for index, tool in enumerate(tools):
        size += len(tool.parameters_json)
        if size > limit:
            raise MillraceError(
                Reason.GRAMMAR_REFUSED,
                f"the schemas of the tools have more than {limit} bytes together: use smaller ones",
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


def length_limit(request: tokenizer_pb2.PrepareRequest, who: context_pb2.RequestContext) -> LengthLimit:
    """The lowest limit that the request and its context state."""
    limits = [request.max_prompt_tokens] if request.HasField("max_prompt_tokens") else []
    if who.HasField("max_context_tokens"):
        limits.append(who.max_context_tokens)
    truncation = _TRUNCATIONS.get(request.truncation, Truncation.REFUSE)
    return LengthLimit(min(limits) if limits else None, truncation)


def prepare_answer(prepared: Prepared, fingerprint: str) -> tokenizer_pb2.PrepareResponse | LargeAnswer:
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


def short_answer(prompted: Prompted, fingerprint: str) -> dict[str, Any]:
    """The fields of an answer without a grammar."""
    return {
        "token_ids": prompted.token_ids,
        "vocabulary_fingerprint": fingerprint,
        "assistant_prefix": prompted.assistant_prefix,
        "num_truncated_tokens": prompted.num_truncated,
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
    )
