"""Answers of the Responses API as types: the response, its items, and the events of its stream.

Both are written as these types, and the OpenAPI document derives its schema from them. The fields are
those of the Open Responses specification of 2026-04-24; custom tools and namespaces are OpenAI's own. A field
that is not always there is UNSET by default; every other field is always written.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from contract.chat import LeftOut
from gateway.faces.retention import KvUsage
from gateway.faces.timings import Timings
from gateway.types.deliberation import Deliberated

Count: TypeAlias = Annotated[int, Meta(ge=0)]
ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
ResponseStatus: TypeAlias = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(Struct, frozen=True, kw_only=True, tag="output_text"):
    text: str
    annotations: list[Any] = []
    # A list of tokens, as written JSON where there are some.
    logprobs: Any = []


class ReasoningText(Struct, frozen=True, kw_only=True, tag="reasoning_text"):
    text: str


# How ids of items begin, by type. They are those of OpenAI: its server refuses others where they come back.
ID_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "compaction": "cmp_",
}


class MessageItem(Struct, frozen=True, kw_only=True, tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(Struct, frozen=True, kw_only=True, tag="reasoning"):
    """What the model thought; `encrypted_content` is there where it was asked for."""

    id: str
    summary: list[Any] = []
    content: list[ReasoningText]
    encrypted_content: str | UnsetType = UNSET
    status: ItemStatus


class FunctionCallItem(Struct, frozen=True, kw_only=True, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET


class CustomToolCallItem(Struct, frozen=True, kw_only=True, tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    input: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET


class CompactionItem(Struct, frozen=True, kw_only=True, tag="compaction"):
    id: str
    encrypted_content: str


OutputItem: TypeAlias = MessageItem | ReasoningItem | FunctionCallItem | CustomToolCallItem | CompactionItem


class IncompleteDetails(Struct, frozen=True):
    reason: Literal["max_output_tokens", "content_filter"]


class ResponseError(Struct, frozen=True):
    code: str
    message: str


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: Count


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: Count


class ResponseUsage(Struct, frozen=True):
    input_tokens: Count
    output_tokens: Count
    total_tokens: Count
    input_tokens_details: InputTokensDetails
    output_tokens_details: OutputTokensDetails
    # Extensions: where they were asked for.
    test_time: Deliberated | UnsetType = UNSET
    kv: KvUsage | UnsetType = UNSET


class Response(Struct, frozen=True, kw_only=True):
    """The resource. `tools`, `tool_choice` and `text` are what was asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: Count
    completed_at: Count | None = None
    status: ResponseStatus
    incomplete_details: IncompleteDetails | None = None
    model: str
    previous_response_id: str | None = None
    conversation: dict[str, Any] | UnsetType = UNSET
    instructions: str | None
    output: list[OutputItem]
    error: ResponseError | None = None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    truncation: Literal["auto", "disabled"]
    parallel_tool_calls: bool
    text: dict[str, Any]
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: Count
    temperature: float
    reasoning: dict[str, Any] | None
    usage: ResponseUsage | None = None
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    # Whether it is kept, whatever was asked for.
    store: bool = False
    background: bool = False
    service_tier: str
    metadata: dict[str, str]
    safety_identifier: str | None
    prompt_cache_key: str | None
    # Extension: where `truncation` has left out some of the conversation.
    left_out: LeftOut | UnsetType = UNSET
    # Extension: where it was asked for, at the end.
    timing: Timings | UnsetType = UNSET
    # Over a WebSocket: what HTTP says in x-millrace-warning and x-millrace-ignored.
    warnings: list[str] | UnsetType = UNSET


class EventError(Struct, frozen=True):
    type: str
    code: str | None
    message: str
    param: str | None


EventType: TypeAlias = Literal[
    "response.created",
    "response.queued",
    "response.in_progress",
    "response.completed",
    "response.incomplete",
    "response.failed",
    "response.output_item.added",
    "response.output_item.done",
    "response.content_part.added",
    "response.content_part.done",
    "response.output_text.delta",
    "response.output_text.done",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.custom_tool_call_input.delta",
    "response.custom_tool_call_input.done",
    "error",
]


class ResponseEvent(Struct, frozen=True, kw_only=True):
    """An event of a stream; which fields it has is said by its type."""

    type: EventType
    sequence_number: Count
    response: Response | UnsetType = UNSET
    output_index: Count | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: Count | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    logprobs: Any = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    # Errors, as the specification has them, and as OpenAI's SDKs read them.
    error: EventError | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET


class InputTokens(Struct, frozen=True, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: Count


class CompactedResponse(Struct, frozen=True, kw_only=True):
    """A conversation made short: what the user said, and a summary of the rest."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    output: list[Any]
    created_at: Count
    usage: ResponseUsage
