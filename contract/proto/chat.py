"""Conversations and response formats: as fields for a message, and from one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from google.protobuf import json_format, struct_pb2
from millrace.common.v1 import chat_pb2
from msgspec.structs import asdict

from contract.chat import (
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
from contract.errors import MillraceError, invalid

_ROLES = {role: chat_pb2.Role.Value(f"ROLE_{role.name}") for role in Role}
_MODES = {mode: chat_pb2.ToolChoiceMode.Value(f"TOOL_CHOICE_MODE_{mode.name}") for mode in ToolChoiceMode}
_ROLE_OF = {number: role for role, number in _ROLES.items()}
_MODE_OF = {number: mode for mode, number in _MODES.items()}

# Fields of a message that most messages do not have.
_TURN_TEXTS = ("name", "tool_call_id", "reasoning")

# Deepest nesting of documents and of template options. Protobuf reads no message that is nested more than a
# hundred levels deep, of which each level here takes up to three: the reader would end the stream, and
# everybody's calls with it. A value takes Python some microseconds.
_MAX_NESTING = 16
_MAX_VALUES = 16 * 1024


def conversation_fields(conversation: Conversation) -> dict[str, Any]:
    """The fields of a conversation's message, those alone that say something: most have only messages, and
    protobuf takes fields without the copy that a message inside a message costs.
    """
    fields: dict[str, Any] = {"messages": [_turn_fields(turn) for turn in conversation.messages]}
    if conversation.tools:
        fields["tools"] = list(map(asdict, conversation.tools))
    if conversation.documents:
        _check_values(conversation.documents, "documents")
        fields["documents"] = [_struct(document) for document in conversation.documents]
    choice = conversation.tool_choice
    if choice.mode is not ToolChoiceMode.AUTO:
        fields["tool_choice"] = {"mode": _MODES[choice.mode], "name": choice.name}
    if conversation.template_options:
        _check_values(conversation.template_options, "template_options")
        fields["template_options"] = _struct(conversation.template_options)
    if conversation.template_name:
        fields["template_name"] = conversation.template_name
    if not conversation.parallel_tool_calls:
        fields["parallel_tool_calls"] = False
    if conversation.continue_final_message:
        fields["continue_final_message"] = True
    return fields


def _turn_fields(turn: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": _ROLES[turn.role], "content": turn.content}
    fields |= {name: value for name in _TURN_TEXTS if (value := getattr(turn, name))}
    if turn.tool_calls:
        fields["tool_calls"] = list(map(asdict, turn.tool_calls))
    return fields


def conversation(message: chat_pb2.Conversation, path: str = "") -> Conversation:
    """A conversation from the wire; raises INVALID_ARGUMENT naming what is below `path` ("conversation.")."""
    _check_values(list(message.documents), f"{path}documents")
    _check_values(message.template_options, f"{path}template_options")
    return Conversation(
        messages=tuple(
            _turn(turn, f"{path}messages[{index}]") for index, turn in enumerate(message.messages)
        ),
        tools=tuple(msgspec.convert(tool, Tool, from_attributes=True) for tool in message.tools),
        tool_choice=_tool_choice(message.tool_choice, f"{path}tool_choice"),
        parallel_tool_calls=message.parallel_tool_calls if message.HasField("parallel_tool_calls") else True,
        template_options=_values(message.template_options) if message.HasField("template_options") else {},
        documents=tuple(_values(document) for document in message.documents),
        template_name=message.template_name,
        continue_final_message=message.continue_final_message,
    )


def _turn(message: chat_pb2.Message, field: str) -> Message:
    role = _ROLE_OF.get(message.role)
    if role is None:
        raise _unknown(f"{field}.role", message.role, _ROLES)
    return Message(
        role=role,
        content=message.content,
        tool_calls=tuple(
            msgspec.convert(call, ToolCall, from_attributes=True) for call in message.tool_calls
        ),
        **{name: getattr(message, name) for name in _TURN_TEXTS},
    )


def _tool_choice(message: chat_pb2.ToolChoice, field: str) -> ToolChoice:
    mode = _MODE_OF.get(message.mode) if message.mode else ToolChoiceMode.AUTO
    if mode is None:
        raise _unknown(f"{field}.mode", message.mode, _MODES)
    if message.name and mode is not ToolChoiceMode.NAMED:
        raise invalid(f"{field}.name", "only the mode NAMED takes it; set the mode, or leave it out")
    return ToolChoice(mode, message.name)


def _unknown(field: str, number: int, values: Mapping[Any, int]) -> MillraceError:
    known = ", ".join(f"{value} ({name.name})" for name, value in values.items())
    return invalid(field, f"{number} is not one of {known}")


def _check_values(value: Any, field: str) -> None:
    """Raises INVALID_ARGUMENT for what is nested too deeply or has too many values, before either costs."""
    level, num_values = [_parts(value) or ()], 0
    for _ in range(_MAX_NESTING):
        inner: list[Collection[Any]] = []
        for each in level:
            num_values += len(each)
            if num_values > _MAX_VALUES:
                raise invalid(field, f"more than {_MAX_VALUES} values; write them as text")
            inner += [parts for child in each if (parts := _parts(child))]
        if not inner:
            return
        level = inner
    raise invalid(field, f"nested more than {_MAX_NESTING} levels deep")


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


def _struct(value: Mapping[str, Any]) -> struct_pb2.Struct:
    result = struct_pb2.Struct()
    result.update(dict(value))
    return result


def _values(struct: struct_pb2.Struct) -> dict[str, Any]:
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


def format_fields(form: ResponseFormat) -> dict[str, Any]:
    """The fields of a response format's message."""
    kind, fields = str(form.__struct_config__.tag), asdict(form)
    # Formats that consist of one text are that text in the message.
    return {kind: next(iter(fields.values())) if kind in ("regex", "lark", "ebnf") else fields}


def response_format(message: chat_pb2.ResponseFormat) -> ResponseFormat | None:
    """A response format from the wire; None when it does not constrain."""
    kind = message.WhichOneof("format")
    return None if kind is None else _FORMATS[kind](getattr(message, kind))


def _json_schema(schema: chat_pb2.JsonSchema) -> JsonSchemaFormat:
    strict = schema.strict if schema.HasField("strict") else True
    return JsonSchemaFormat(schema.schema_json, schema.name, strict)


_FORMATS: Mapping[str, Any] = {
    "json_object": lambda _: JsonObjectFormat(),
    "json_schema": _json_schema,
    "regex": RegexFormat,
    "choice": lambda choice: ChoiceFormat(tuple(choice.options)),
    "lark": LarkFormat,
    "ebnf": EbnfFormat,
}
