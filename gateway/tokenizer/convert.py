"""Domain types to tokenizer messages and back; the gRPC face uses the inverse for what clients send."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from google.protobuf import json_format, struct_pb2
from millrace.common.v1 import chat_pb2, grammar_pb2
from millrace.tokenizer.v1 import tokenizer_pb2

from gateway.engines.types import Grammar
from gateway.pipeline.request import (
    ChoiceFormat,
    Conversation,
    EbnfFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    LarkFormat,
    Message,
    RegexFormat,
    ResponseFormat,
    Role,
    Tool,
    ToolCall,
    ToolChoice,
    ToolChoiceMode,
)
from gateway.text.vocabulary import DecoderKind, Vocabulary
from gateway.tokenizer.types import Enforcement, KeywordStatus, Prepared, Verdict
from services.errors import MillraceError, Reason

_ROLES = {role: chat_pb2.Role.Value(f"ROLE_{role.name}") for role in Role}
_MODES = {mode: chat_pb2.ToolChoiceMode.Value(f"TOOL_CHOICE_MODE_{mode.name}") for mode in ToolChoiceMode}
_ROLE_OF = {number: role for role, number in _ROLES.items()}
_MODE_OF = {number: mode for mode, number in _MODES.items()}
_DECODERS = {
    tokenizer_pb2.DECODER_KIND_UNSPECIFIED: DecoderKind.BYTE_LEVEL,
    tokenizer_pb2.DECODER_KIND_BYTE_LEVEL: DecoderKind.BYTE_LEVEL,
    tokenizer_pb2.DECODER_KIND_SENTENCEPIECE: DecoderKind.SENTENCEPIECE,
    tokenizer_pb2.DECODER_KIND_METASPACE: DecoderKind.METASPACE,
}


# Of documents and of template options. Protobuf reads no message that is nested more than a hundred levels
# deep, of which each level here takes up to three: the service would end the stream, and everybody's calls
# with it. A value takes Python some microseconds.
_MAX_NESTING = 16
_MAX_VALUES = 16 * 1024


def conversation_fields(conversation: Conversation) -> dict[str, Any]:
    """The fields of a conversation's message, those alone that say something: most have only messages, and
    protobuf takes fields without the copy that a message inside a message costs.
    """
    fields: dict[str, Any] = {"messages": [_turn_fields(turn) for turn in conversation.messages]}
    if conversation.tools:
        fields["tools"] = [
            {
                "name": tool.name,
                "description": tool.description,
                "parameters_json": tool.parameters_json,
                "strict": tool.strict,
            }
            for tool in conversation.tools
        ]
    if conversation.documents:
        _check_values(conversation.documents, "documents")
        fields["documents"] = [_struct(document) for document in conversation.documents]
    if conversation.tool_choice is not None:
        choice = conversation.tool_choice
        fields["tool_choice"] = {"mode": _MODES[choice.mode], "name": choice.name}
    if conversation.template_options:
        _check_values(conversation.template_options, "template_options")
        fields["template_options"] = _struct(conversation.template_options)
    if conversation.template_name:
        fields["template_name"] = conversation.template_name
    # None is not set.
    fields["parallel_tool_calls"] = conversation.parallel_tool_calls
    fields["continue_final_message"] = conversation.continue_final_message
    return fields


def _turn_fields(turn: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": _ROLES[turn.role], "content": turn.content}
    if turn.name:
        fields["name"] = turn.name
    if turn.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments_json": call.arguments_json}
            for call in turn.tool_calls
        ]
    if turn.tool_call_id:
        fields["tool_call_id"] = turn.tool_call_id
    if turn.reasoning:
        fields["reasoning"] = turn.reasoning
    return fields


def _check_values(value: Any, field: str) -> None:
    """Raises INVALID_ARGUMENT for what is nested too deeply or has too many values, before either costs."""
    level, num_values = [_parts(value) or ()], 0
    for _ in range(_MAX_NESTING):
        inner: list[Collection[Any]] = []
        for each in level:
            num_values += len(each)
            if num_values > _MAX_VALUES:
                raise _invalid(field, f"more than {_MAX_VALUES} values; write them as text")
            inner += [parts for child in each if (parts := _parts(child))]
        if not inner:
            return
        level = inner
    raise _invalid(field, f"nested more than {_MAX_NESTING} levels deep")


def _parts(value: Any) -> Collection[Any] | None:
    """What a list or an object holds, as JSON has them or protobuf; None for everything else."""
    match value:
        case dict():
            return value.values()
        case list() | tuple():
            return value
        case struct_pb2.Struct():
            return value.fields.values()
        case struct_pb2.ListValue():
            return value.values
        case struct_pb2.Value():
            kind = value.WhichOneof("kind")
            return _parts(getattr(value, kind)) if kind in ("struct_value", "list_value") else None
        case _:
            return None


def _invalid(field: str, problem: str) -> MillraceError:
    return MillraceError(Reason.INVALID_ARGUMENT, f"{field}: {problem}", field=field)


def _struct(value: Any) -> struct_pb2.Struct:
    result = struct_pb2.Struct()
    result.update(dict(value))
    return result


def conversation(message: chat_pb2.Conversation, field: str) -> Conversation:
    """A conversation from the wire; raises INVALID_ARGUMENT naming what is below `field`."""
    choice = None
    if message.HasField("tool_choice") and message.tool_choice.mode:
        mode = _MODE_OF.get(message.tool_choice.mode)
        if mode is None:
            raise _unknown(f"{field}.tool_choice.mode", message.tool_choice.mode, _MODES)
        choice = ToolChoice(mode, message.tool_choice.name)
    if message.tool_choice.name and (choice is None or choice.mode is not ToolChoiceMode.NAMED):
        raise MillraceError(
            Reason.INVALID_ARGUMENT,
            f"{field}.tool_choice.name: only the mode NAMED takes it; set the mode, or leave it out",
            field=f"{field}.tool_choice.name",
        )
    _check_values(list(message.documents), f"{field}.documents")
    _check_values(message.template_options, f"{field}.template_options")
    return Conversation(
        messages=tuple(
            _turn(turn, f"{field}.messages[{index}]") for index, turn in enumerate(message.messages)
        ),
        tools=tuple(
            Tool(
                name=tool.name,
                description=tool.description,
                parameters_json=tool.parameters_json,
                strict=tool.strict if tool.HasField("strict") else None,
            )
            for tool in message.tools
        ),
        tool_choice=choice,
        parallel_tool_calls=message.parallel_tool_calls if message.HasField("parallel_tool_calls") else None,
        template_options=json_format.MessageToDict(message.template_options)
        if message.HasField("template_options")
        else {},
        documents=tuple(json_format.MessageToDict(document) for document in message.documents),
        template_name=message.template_name,
        continue_final_message=message.continue_final_message
        if message.HasField("continue_final_message")
        else None,
    )


def _turn(message: chat_pb2.Message, field: str) -> Message:
    role = _ROLE_OF.get(message.role)
    if role is None:
        raise _unknown(f"{field}.role", message.role, _ROLES)
    return Message(
        role=role,
        content=message.content,
        name=message.name,
        tool_calls=tuple(ToolCall(call.id, call.name, call.arguments_json) for call in message.tool_calls),
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning,
    )


def _unknown(field: str, number: int, values: Mapping[Any, int]) -> MillraceError:
    known = ", ".join(f"{value} ({name.name})" for name, value in values.items())
    return MillraceError(Reason.INVALID_ARGUMENT, f"{field}: {number} is not one of {known}", field=field)


def format_message(format_: ResponseFormat) -> chat_pb2.ResponseFormat:
    """A response format for the wire."""
    match format_:
        case JsonObjectFormat():
            return chat_pb2.ResponseFormat(json_object=chat_pb2.JsonObject())
        case JsonSchemaFormat():
            schema = chat_pb2.JsonSchema(
                name=format_.name, schema_json=format_.schema_json, strict=format_.strict
            )
            return chat_pb2.ResponseFormat(json_schema=schema)
        case RegexFormat(pattern=pattern):
            return chat_pb2.ResponseFormat(regex=pattern)
        case ChoiceFormat(options=options):
            return chat_pb2.ResponseFormat(choice=chat_pb2.Choice(options=options))
        case LarkFormat(grammar=grammar):
            return chat_pb2.ResponseFormat(lark=grammar)
        case EbnfFormat(grammar=grammar):
            return chat_pb2.ResponseFormat(ebnf=grammar)


def response_format(  # noqa: PLR0911 one return per kind
    message: chat_pb2.ResponseFormat,
) -> ResponseFormat | None:
    """A response format from the wire; None when it does not constrain."""
    match message.WhichOneof("format"):
        case "json_object":
            return JsonObjectFormat()
        case "json_schema":
            schema = message.json_schema
            strict = schema.strict if schema.HasField("strict") else None
            return JsonSchemaFormat(schema.schema_json, schema.name, strict)
        case "regex":
            return RegexFormat(message.regex)
        case "choice":
            return ChoiceFormat(tuple(message.choice.options))
        case "lark":
            return LarkFormat(message.lark)
        case "ebnf":
            return EbnfFormat(message.ebnf)
        case _:
            return None


def prepared(message: tokenizer_pb2.PrepareResponse) -> Prepared:
    """What the tokenizer service made of a request."""
    grammar = None
    if message.HasField("grammar"):
        grammar = Grammar(message.grammar.digest, message.grammar.payload, message.grammar.backend)
    return Prepared(
        token_ids=tuple(message.token_ids),
        grammar=grammar,
        enforcement=enforcement(message.enforcement) if message.HasField("enforcement") else None,
        vocabulary_fingerprint=message.vocabulary_fingerprint,
        compile_s=message.timings.compile_s,
        grammar_cached=message.grammar_cached,
        assistant_prefix=message.assistant_prefix,
    )


def enforcement(message: grammar_pb2.EnforcementReport) -> Enforcement:
    """What of a schema holds by construction."""

    def statuses(items: Any) -> tuple[KeywordStatus, ...]:
        return tuple(KeywordStatus(item.keyword, item.path, item.note) for item in items)

    return Enforcement(
        statuses(message.enforced), statuses(message.approximated), statuses(message.unenforced)
    )


def enforcement_message(report: Enforcement) -> grammar_pb2.EnforcementReport:
    """The same for the public gRPC face."""

    def statuses(items: tuple[KeywordStatus, ...]) -> list[grammar_pb2.KeywordStatus]:
        return [
            grammar_pb2.KeywordStatus(keyword=item.keyword, path=item.path, note=item.note) for item in items
        ]

    return grammar_pb2.EnforcementReport(
        enforced=statuses(report.enforced),
        approximated=statuses(report.approximated),
        unenforced=statuses(report.unenforced),
    )


def vocabulary(message: tokenizer_pb2.GetVocabularyResponse) -> Vocabulary:
    """What decoding needs."""
    config: dict[str, Any] = {}
    if message.generation_config_json:
        config = msgspec.json.decode(message.generation_config_json, type=dict[str, Any])
    return Vocabulary(
        fingerprint=message.fingerprint,
        decoder=_DECODERS[message.decoder],
        tokens=tuple(message.tokens),
        special_ids=frozenset(message.special_ids),
        byte_ids=frozenset(message.byte_token_ids),
        eos_token_ids=tuple(message.eos_token_ids),
        bos_token_id=message.bos_token_id if message.HasField("bos_token_id") else None,
        tool_call_format=message.tool_call_format,
        reasoning_format=message.reasoning_format,
        generation_config=config,
    )


def verdict(message: grammar_pb2.OutputVerdict) -> Verdict:
    """A verdict from the wire."""
    return Verdict(
        message.valid, message.keyword, message.schema_path, message.instance_path, message.message
    )


def verdict_message(verdict: Verdict | None) -> grammar_pb2.OutputVerdict | None:
    """A verdict for the wire; nothing where none was asked for."""
    if verdict is None:
        return None
    return grammar_pb2.OutputVerdict(
        valid=verdict.valid,
        keyword=verdict.keyword,
        schema_path=verdict.schema_path,
        instance_path=verdict.instance_path,
        message=verdict.message,
    )
