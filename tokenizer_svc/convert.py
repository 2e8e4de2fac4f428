"""Wire messages to domain types and back. Nothing else in this package but the servicer sees protos."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from google.protobuf import json_format, struct_pb2
from millrace.common.v1 import chat_pb2, context_pb2, grammar_pb2
from millrace.tokenizer.v1 import tokenizer_pb2

from services.errors import MillraceError, Reason
from tokenizer_svc.checkpoint import Checkpoint
from tokenizer_svc.types import (
    Artifact,
    ChoiceFormat,
    Conversation,
    EbnfFormat,
    EnforcementReport,
    JsonObjectFormat,
    JsonSchemaFormat,
    KeywordStatus,
    LarkFormat,
    LengthLimit,
    Message,
    Prepared,
    RegexFormat,
    ResponseFormat,
    Role,
    Tool,
    ToolCall,
    ToolChoiceMode,
    Truncation,
    Verdict,
)
from tokenizer_svc.vocabulary import DecoderKind
from tokenizer_svc.wire import LargeAnswer

_ROLES = {
    chat_pb2.ROLE_SYSTEM: Role.SYSTEM,
    chat_pb2.ROLE_DEVELOPER: Role.DEVELOPER,
    chat_pb2.ROLE_USER: Role.USER,
    chat_pb2.ROLE_ASSISTANT: Role.ASSISTANT,
    chat_pb2.ROLE_TOOL: Role.TOOL,
}
_CHOICES = {
    chat_pb2.TOOL_CHOICE_MODE_NONE: ToolChoiceMode.NONE,
    chat_pb2.TOOL_CHOICE_MODE_AUTO: ToolChoiceMode.AUTO,
    chat_pb2.TOOL_CHOICE_MODE_REQUIRED: ToolChoiceMode.REQUIRED,
    chat_pb2.TOOL_CHOICE_MODE_NAMED: ToolChoiceMode.NAMED,
}
_DECODERS = {
    DecoderKind.BYTE_LEVEL: tokenizer_pb2.DECODER_KIND_BYTE_LEVEL,
    DecoderKind.SENTENCEPIECE: tokenizer_pb2.DECODER_KIND_SENTENCEPIECE,
    DecoderKind.METASPACE: tokenizer_pb2.DECODER_KIND_METASPACE,
}


def conversation(message: chat_pb2.Conversation, *, max_tool_bytes: int) -> Conversation:
    """Raises INVALID_ARGUMENT for unknown roles, and for tool schemas that are not JSON objects.

    GRAMMAR_REFUSED when the tools' schemas are larger than `max_tool_bytes` together.
    """
    _check_tool_bytes(message.tools, max_tool_bytes)
    mode = _CHOICES.get(message.tool_choice.mode, ToolChoiceMode.AUTO)
    return Conversation(
        messages=tuple(_message(each, index) for index, each in enumerate(message.messages)),
        tools=tuple(_tool(each, index) for index, each in enumerate(message.tools)),
        tool_choice=mode,
        tool_choice_name=message.tool_choice.name,
        parallel_tool_calls=message.parallel_tool_calls if message.HasField("parallel_tool_calls") else True,
        template_options=_struct(message.template_options) if message.HasField("template_options") else {},
        documents=tuple(_struct(document) for document in message.documents),
        template_name=message.template_name,
        continue_final_message=message.continue_final_message,
    )


def _message(message: chat_pb2.Message, index: int) -> Message:
    role = _ROLES.get(message.role)
    if role is None:
        raise MillraceError(
            Reason.INVALID_ARGUMENT,
            f"message {index} has no role; use system, developer, user, assistant or tool",
            field=f"messages[{index}].role",
        )
    return Message(
        role=role,
        content=message.content,
        name=message.name,
        tool_calls=tuple(
            ToolCall(id=call.id, name=call.name, arguments_json=call.arguments_json)
            for call in message.tool_calls
        ),
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning,
    )


def _tool(tool: chat_pb2.Tool, index: int) -> Tool:
    parameters = None
    if tool.parameters_json:
        try:
            parameters = json.loads(tool.parameters_json)
        except (ValueError, RecursionError) as error:
            raise _bad_parameters(index, f"is not JSON: {error}") from error
        if not isinstance(parameters, dict):
            raise _bad_parameters(index, "must be a JSON object")
    return Tool(name=tool.name, description=tool.description, parameters=parameters, strict=tool.strict)


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


def _bad_parameters(index: int, problem: str) -> MillraceError:
    return MillraceError(
        Reason.INVALID_ARGUMENT,
        f"the schema of tool {index}'s arguments {problem}",
        field=f"tools[{index}].function.parameters",
    )


def _struct(struct: struct_pb2.Struct) -> dict[str, Any]:
    value: dict[str, Any] = _whole_numbers(json_format.MessageToDict(struct))
    return value


def _whole_numbers(value: Any) -> Any:
    # Struct carries every number as a double; templates would print 5 as 5.0.
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list):
        return [_whole_numbers(each) for each in value]
    if isinstance(value, dict):
        return {key: _whole_numbers(each) for key, each in value.items()}
    return value


def response_format(message: chat_pb2.ResponseFormat) -> ResponseFormat | None:
    """The format, or None when none is set."""
    kind = message.WhichOneof("format")
    return _FORMATS[kind](message) if kind else None


def _json_schema(message: chat_pb2.ResponseFormat) -> JsonSchemaFormat:
    schema = message.json_schema
    strict = schema.strict if schema.HasField("strict") else True
    return JsonSchemaFormat(schema_json=schema.schema_json, strict=strict)


_FORMATS: dict[str, Callable[[chat_pb2.ResponseFormat], ResponseFormat]] = {
    "json_object": lambda message: JsonObjectFormat(),
    "json_schema": _json_schema,
    "regex": lambda message: RegexFormat(pattern=message.regex),
    "choice": lambda message: ChoiceFormat(options=tuple(message.choice.options)),
    "lark": lambda message: LarkFormat(grammar=message.lark),
    "ebnf": lambda message: EbnfFormat(grammar=message.ebnf),
}


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


def verdict(each: Verdict) -> grammar_pb2.OutputVerdict:
    """A verdict on the wire."""
    return grammar_pb2.OutputVerdict(
        valid=each.valid,
        keyword=each.keyword,
        schema_path=each.schema_path,
        instance_path=each.instance_path,
        message=each.message,
    )


def prepare_answer(prepared: Prepared, fingerprint: str) -> tokenizer_pb2.PrepareResponse | LargeAnswer:
    """The answer to Prepare; serialized where its ids are."""
    response = _prepare_response(prepared, fingerprint)
    if isinstance(prepared.token_ids, memoryview):
        return LargeAnswer((prepared.token_ids, response.SerializeToString()))
    response.token_ids.extend(prepared.token_ids)
    return response


def short_answer(prepared: Prepared, fingerprint: str) -> dict[str, Any]:
    """The same as fields, for what has no grammar."""
    return {
        "token_ids": prepared.token_ids,
        "vocabulary_fingerprint": fingerprint,
        "assistant_prefix": prepared.assistant_prefix,
        "timings": {"render_s": prepared.render_s, "encode_s": prepared.encode_s},
    }


def _prepare_response(prepared: Prepared, fingerprint: str) -> tokenizer_pb2.PrepareResponse:
    """All but the ids."""
    response = tokenizer_pb2.PrepareResponse(
        vocabulary_fingerprint=fingerprint,
        grammar_cached=prepared.grammar_cached,
        assistant_prefix=prepared.assistant_prefix,
        num_truncated_tokens=prepared.num_truncated,
        timings=tokenizer_pb2.PrepareTimings(
            render_s=prepared.render_s, encode_s=prepared.encode_s, compile_s=prepared.compile_s
        ),
    )
    if prepared.compiled is not None:
        response.grammar.CopyFrom(_artifact(prepared.compiled.artifact))
        if prepared.compiled.enforcement is not None:
            response.enforcement.CopyFrom(enforcement(prepared.compiled.enforcement))
    return response


def _artifact(artifact: Artifact) -> grammar_pb2.GrammarArtifact:
    return grammar_pb2.GrammarArtifact(
        digest=artifact.digest, payload=artifact.payload, backend=artifact.backend
    )


def enforcement(report: EnforcementReport) -> grammar_pb2.EnforcementReport:
    """A report on the wire."""
    return grammar_pb2.EnforcementReport(
        enforced=[_status(each) for each in report.enforced],
        approximated=[_status(each) for each in report.approximated],
        unenforced=[_status(each) for each in report.unenforced],
    )


def _status(status: KeywordStatus) -> grammar_pb2.KeywordStatus:
    return grammar_pb2.KeywordStatus(keyword=status.keyword, path=status.path, note=status.note)


def vocabulary_response(
    checkpoint: Checkpoint, tool_call_format: str, reasoning_format: str
) -> tokenizer_pb2.GetVocabularyResponse:
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
        tool_call_format=tool_call_format,
        reasoning_format=reasoning_format,
        generation_config_json=checkpoint.generation_config_json,
    )
