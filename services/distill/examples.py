"""Stored responses as conversations to learn from, of tenants who have consented."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from contract.chat import Message, Role, Tool, ToolCall
from contract.errors import MillraceError, invalid
from gateway.faces.responses.items import InputItem, messages_of
from gateway.faces.responses.tools import OfferedTool, toolbox
from gateway.store.conversations import ConversationStore
from gateway.store.database import StoredItem
from gateway.store.responses import ResponseStore
from gateway.store.seal import SealBroken

# Of one conversation.
MAX_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which responses are written. Empty `models` are all of them."""

    models: frozenset[str] = frozenset()
    since_unix_s: float = 0.0
    # Thoughts of the assistant are part of what is learned.
    with_thoughts: bool = False

    def has(self, resource: dict[str, Any]) -> bool:
        """Whether a response is one of them."""
        is_named = not self.models or resource["model"] in self.models
        return is_named and resource["created_at"] >= self.since_unix_s


@dataclass(frozen=True)
class NotWritten:
    """A response that is left out, and why, in words that are counted."""

    why: str


class StoredTeacher:
    """What is stored, read for export. Nothing that it reads is kept for longer because of it."""

    def __init__(self, responses: ResponseStore, conversations: ConversationStore) -> None:
        self._responses, self._conversations = responses, conversations

    def examples(self, tenant: str, chosen: Selection) -> Iterator[dict[str, Any] | NotWritten]:
        """A conversation that ends with the model's answer for each whole response of the tenant's, or why it
        is left out.
        """
        last = ""
        while ids := self._responses.completed(tenant, last):
            for id_ in ids:
                found = self._example(tenant, id_, chosen)
                if found is not None:
                    yield found
            last = ids[-1]

    def _example(self, tenant: str, id_: str, chosen: Selection) -> dict[str, Any] | NotWritten | None:
        """None for what nobody asked for."""
        try:
            resource = self._responses.get(tenant, id_)
            return self._written(tenant, id_, resource, chosen) if chosen.has(resource) else None
        except MillraceError as error:
            return NotWritten(_why(error))
        except SealBroken:
            return NotWritten("what is stored cannot be decrypted with the keys of gateway.store")
        except msgspec.ValidationError:
            return NotWritten("items of another version")

    def _written(
        self, tenant: str, id_: str, resource: dict[str, Any], chosen: Selection
    ) -> dict[str, Any] | NotWritten:
        items = [_item(each) for each in self._items(tenant, id_, resource)]
        messages = messages_of(items, resource.get("instructions"), _sealed)
        if not messages or messages[-1].role is not Role.ASSISTANT:
            return NotWritten("no answer of the assistant's at its end")
        written = [_message(each, with_thoughts=chosen.with_thoughts) for each in messages]
        tools = toolbox(msgspec.convert(resource.get("tools") or [], list[OfferedTool])).tools
        offered = {"tools": [_tool(each) for each in tools]} if tools else {}
        return {"messages": written, **offered, "model": resource["model"]}

    def _items(self, tenant: str, id_: str, resource: dict[str, Any]) -> Sequence[StoredItem]:
        conversation = resource.get("conversation")
        own = self._responses.history(tenant, id_, max_bytes=MAX_BYTES, renew=False)
        if own.is_cut:
            raise invalid("previous_response_id", _TOO_LONG)
        if not conversation:
            return own.items
        before, is_cut = self._conversations.history(tenant, conversation["id"], max_bytes=MAX_BYTES)
        if is_cut:
            raise invalid("conversation", _TOO_LONG)
        # What was said in the conversation after this response is no part of its prompt.
        first = own.items[0].id
        count = next((index for index, each in enumerate(before) if each.id == first), len(before))
        return [*before[:count], *own.items]


_TOO_LONG = "longer than 64 MiB"
_decode_item = msgspec.json.Decoder(InputItem).decode


def _item(stored: StoredItem) -> InputItem:
    item = _decode_item(stored.body)
    # What is written out beside it says the same; without that there are no thoughts to learn.
    return msgspec.structs.replace(item, encrypted_content=None) if item.type == "reasoning" else item


def _sealed(_sealed: str, field: str) -> NoReturn:
    raise invalid(field, "compacted")


def _why(error: MillraceError) -> str:
    """The reason in a word or two; texts of tenants are in none of them."""
    known = {"compacted": "its beginning was compacted", _TOO_LONG: f"its conversation is {_TOO_LONG}"}
    return next((words for part, words in known.items() if part in str(error)), "a turn before it is gone")


def _message(message: Message, *, with_thoughts: bool) -> dict[str, Any]:
    """As `messages` of /v1/chat/completions has it."""
    written: dict[str, Any] = {"role": str(message.role), "content": message.content}
    if message.reasoning and with_thoughts:
        written["reasoning_content"] = message.reasoning
    if message.tool_calls:
        written["tool_calls"] = [_call(each) for each in message.tool_calls]
    if message.tool_call_id:
        written["tool_call_id"] = message.tool_call_id
    return written


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments_json}
    return {"id": call.id, "type": "function", "function": function}


def _tool(tool: Tool) -> dict[str, Any]:
    parameters = msgspec.json.decode(tool.parameters_json) if tool.parameters_json else {}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}
