"""Items of the Responses API as clients send them, and what of a conversation each of them becomes.

An item is one part of a turn: thoughts, a message, a call, what a call gave. What the assistant said and
called in a row is one message here, because templates render it so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from contract.chat import Message, Role, ToolCall
from contract.errors import MillraceError, invalid, unsupported
from gateway.faces.bodies import Tolerance
from gateway.pipeline.validate import SizedConversation

# Opens what was sealed for the caller's tenant; raises INVALID_ARGUMENT below a field: (sealed, field).
Open: TypeAlias = Callable[[str, str], str]

_NO_REFERENCE = "send the item itself"


class ItemPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A part of an item's content. Those of other types than text are decoded to be refused by type."""

    type: str
    text: str | None = None
    refusal: str | None = None
    # Clients send them back as they came; they say nothing to the model.
    annotations: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    logprobs: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class InputItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An item; `type` says which of the fields it has. Without one it is a message."""

    type: str | None = None
    id: str | None = None
    status: str | None = None
    # message
    role: str | None = None
    content: str | list[ItemPart] | None = None
    phase: str | None = None
    # function_call, custom_tool_call, and what they gave
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[ItemPart] | None = None
    # reasoning, compaction
    summary: list[ItemPart] | None = None
    encrypted_content: str | None = None


# Strange keys of items are ignored: clients send back what other servers wrote.
ITEM_TOLERANCE = Tolerance(
    {"input": InputItem}, {InputItem: {"content": ItemPart, "output": ItemPart, "summary": ItemPart}}
)
_TEXT_TYPES = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_ROLES = ("user", "assistant", "system", "developer")
# Fields that an item of a type cannot do without.
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "custom_tool_call": ("call_id", "name", "input"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call_output": ("call_id", "output"),
    "reasoning": (),
    "compaction": ("encrypted_content",),
}


def joined(namespace: str | None, name: str) -> str:
    """The one name by which a model knows a tool that stands in a namespace."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


def custom_arguments(text: str) -> str:
    """What a custom tool is given, as the arguments of the function that stands for it."""
    return msgspec.json.encode({"input": text}).decode()


def conversation_size(given: str | Sequence[InputItem], num_tools: int) -> SizedConversation:
    """What there is of everything in a conversation, counted before anything is made of it."""
    items = () if isinstance(given, str) else given
    return SizedConversation(
        num_messages=len(items) + 1,
        num_parts=sum(
            len(part) for item in items for part in (item.content, item.output) if isinstance(part, list)
        ),
        num_tool_calls=sum(item.type in ("function_call", "custom_tool_call") for item in items),
        num_tools=num_tools,
    )


def messages_of(
    given: str | Sequence[InputItem], instructions: str | None, unseal: Open, path: str = "input"
) -> tuple[Message, ...]:
    """The messages of a conversation: `instructions` as the system's, then the items in their order.

    Raises INVALID_ARGUMENT or UNSUPPORTED_FIELD with the path of the field, as in `input[2].content[0].type`.
    """
    turns = _Turns()
    if instructions:
        turns.add(Message(role=Role.SYSTEM, content=instructions))
    if isinstance(given, str):
        turns.add(Message(role=Role.USER, content=given))
    else:
        for index, item in enumerate(given):
            _take(turns, item, f"{path}[{index}]", unseal)
    return turns.all()


class _Turns:
    """Messages so far, and what the assistant has said since: thoughts, then content, then calls."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._reasoning, self._content = "", ""
        self._calls: list[ToolCall] = []

    def add(self, message: Message) -> None:
        self._flush()
        self._messages.append(message)

    def think(self, text: str) -> None:
        if self._content or self._calls:
            self._flush()
        self._reasoning += text

    def say(self, text: str) -> None:
        if self._calls:
            self._flush()
        self._content += text

    def call(self, call: ToolCall) -> None:
        self._calls.append(call)

    def all(self) -> tuple[Message, ...]:
        self._flush()
        return tuple(self._messages)

    def _flush(self) -> None:
        if self._reasoning or self._content or self._calls:
            self._messages.append(
                Message(
                    role=Role.ASSISTANT,
                    content=self._content,
                    reasoning=self._reasoning,
                    tool_calls=tuple(self._calls),
                )
            )
        self._reasoning, self._content, self._calls = "", "", []


def _take(turns: _Turns, item: InputItem, field: str, unseal: Open) -> None:
    kind = _kind(item, field)
    if kind == "item_reference":
        raise unsupported(f"{field}.id", _NO_REFERENCE, "a reference to a kept item has no place here")
    if kind not in _REQUIRED:
        remedy = f"use one of {', '.join(_REQUIRED)}"
        raise unsupported(f"{field}.type", remedy, f"{kind!r} is not supported")
    for name in _REQUIRED[kind]:
        if getattr(item, name) is None:
            raise invalid(f"{field}.{name}", f"it is required in an item of type {kind!r}")
    for name in ("call_id", "name"):
        if name in _REQUIRED[kind] and not getattr(item, name):
            raise invalid(f"{field}.{name}", "it is empty")
    match kind:
        case "message":
            _take_message(turns, item, field)
        case "reasoning":
            turns.think(_thoughts(item, field, unseal))
        case "function_call":
            turns.call(_call(item, item.arguments or ""))
        case "custom_tool_call":
            turns.call(_call(item, custom_arguments(item.input or "")))
        case "compaction":
            summary = unseal(item.encrypted_content or "", f"{field}.encrypted_content")
            turns.add(Message(role=Role.USER, content=summary))
        case _:
            content = text_of(item.output, f"{field}.output")
            turns.add(Message(role=Role.TOOL, content=content, tool_call_id=item.call_id or ""))


def _kind(item: InputItem, field: str) -> str:
    """The type of an item; without one it is a message where it has a role, else a reference by its id."""
    if item.type is not None:
        return item.type
    if item.role is not None:
        return "message"
    if item.id is None:
        raise invalid(
            f"{field}.type", f"it is required in an item without role: one of {', '.join(_REQUIRED)}"
        )
    return "item_reference"


def _take_message(turns: _Turns, item: InputItem, field: str) -> None:
    if item.role not in _ROLES:
        raise invalid(f"{field}.role", f"{item.role!r} is not one of {', '.join(_ROLES)}")
    content, role = text_of(item.content, f"{field}.content"), Role(item.role)
    if role is Role.ASSISTANT:
        turns.say(content)
    else:
        turns.add(Message(role=role, content=content))


def _call(item: InputItem, arguments: str) -> ToolCall:
    return ToolCall(item.call_id or "", joined(item.namespace, item.name or ""), arguments)


def _thoughts(item: InputItem, field: str, unseal: Open) -> str:
    """What was sealed is the whole of it; else what is written out, or at least its summary."""
    if item.encrypted_content:
        return unseal(item.encrypted_content, f"{field}.encrypted_content")
    return text_of(item.content, f"{field}.content") or text_of(item.summary, f"{field}.summary")


def text_of(content: str | list[ItemPart] | None, field: str) -> str:
    """The text of all parts; raises by the path of the part that is none."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join([_part(part, f"{field}[{index}]") for index, part in enumerate(content)])


def _part(part: ItemPart, field: str) -> str:
    name = "refusal" if part.type == "refusal" else "text"
    if name == "text" and part.type not in _TEXT_TYPES:
        raise _not_text(part.type, field)
    text: str | None = getattr(part, name)
    if text is None:
        raise invalid(f"{field}.{name}", f"it is required in a part of type {part.type!r}")
    return text


def _not_text(kind: str, field: str) -> MillraceError:
    return unsupported(f"{field}.type", "the model reads text only", f"{kind!r} is not supported")
