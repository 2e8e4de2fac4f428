"""Every answer of the face as a type, from which its OpenAPI document derives schemas.

Events are written piece by piece (`answers`), because one has to cost little; tests hold what is written to
these types. A field that is not always there is UNSET by default; every other field is always written.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, get_args

from msgspec import UNSET, Meta, Struct, UnsetType

from contract.chat import LeftOut
from gateway.faces.retention import KvUsage
from gateway.faces.timings import Timings
from gateway.types.deliberation import Deliberated

TokenCount: TypeAlias = Annotated[int, Meta(ge=0)]
StopReason: TypeAlias = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class ThoughtTokens(Struct, frozen=True):
    thinking_tokens: TokenCount


class MessageUsage(Struct, frozen=True, kw_only=True):
    """`input_tokens` are those of the prompt that were not cached."""

    input_tokens: TokenCount
    # What is computed is cached, and costs nothing more.
    cache_creation_input_tokens: TokenCount = 0
    cache_read_input_tokens: TokenCount
    output_tokens: TokenCount
    output_tokens_details: ThoughtTokens
    # The tier that serves; "standard" for the one that others call default.
    service_tier: str
    # Extensions: where they were asked for, at the end.
    test_time: Deliberated | UnsetType = UNSET
    kv: KvUsage | UnsetType = UNSET


class TextAnswer(Struct, frozen=True, tag_field="type", tag="text"):
    text: str
    citations: None = None


class ThinkingAnswer(Struct, frozen=True, tag_field="type", tag="thinking"):
    """`signature` goes back with `thinking` as it is."""

    thinking: str
    signature: str


class ToolUseAnswer(Struct, frozen=True, tag_field="type", tag="tool_use"):
    """`input` is the call's arguments; of those that are cut or broken, the members that are whole."""

    id: str
    name: str
    input: dict[str, Any]


AnswerBlock: TypeAlias = TextAnswer | ThinkingAnswer | ToolUseAnswer


class MessageAnswer(Struct, frozen=True, kw_only=True):
    """A message; without content and stop reason where a stream begins."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    # Extension: where truncation has left out some of the conversation; message_delta has it, too.
    left_out: LeftOut | UnsetType = UNSET
    # Extension: where it was asked for, at the end; in a stream it is message_delta's.
    timing: Timings | UnsetType = UNSET


class InputTokenCount(Struct, frozen=True):
    input_tokens: TokenCount


class MessageModel(Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["model"] = "model"
    display_name: str
    # RFC 3339.
    created_at: str
    lifecycle: Literal["active"] = "active"
    # Prompt and answer together; null while no engine is there.
    max_input_tokens: TokenCount | None
    max_tokens: TokenCount | None


class MessageModelList(Struct, frozen=True, kw_only=True):
    """A page of them."""

    data: list[MessageModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class TextPiece(Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingPiece(Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignaturePiece(Struct, frozen=True, tag_field="type", tag="signature_delta"):
    signature: str


class InputPiece(Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class MessageEnd(Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageStart(Struct, frozen=True, tag_field="type", tag="message_start"):
    message: MessageAnswer


class Ping(Struct, frozen=True, tag_field="type", tag="ping"):
    """Something is under way of which nothing can be sent yet."""


class BlockStart(Struct, frozen=True, tag_field="type", tag="content_block_start"):
    index: TokenCount
    content_block: AnswerBlock


class BlockDelta(Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    index: TokenCount
    delta: TextPiece | ThinkingPiece | SignaturePiece | InputPiece


class BlockStop(Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: TokenCount


class MessageDelta(Struct, frozen=True, tag_field="type", tag="message_delta"):
    delta: MessageEnd
    usage: MessageUsage
    left_out: LeftOut | UnsetType = UNSET
    timing: Timings | UnsetType = UNSET


class MessageStop(Struct, frozen=True, tag_field="type", tag="message_stop"):
    """Nothing follows."""


MessageEvent: TypeAlias = (
    MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
)
# Every event of a stream but an error.
EVENTS = get_args(MessageEvent)
