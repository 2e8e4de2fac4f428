"""Bodies of requests as Anthropic declares them."""

from __future__ import annotations

import msgspec

from gateway.faces.anthropic.fields import FIELDS
from gateway.faces.bodies import Tolerance
from gateway.faces.retention import RetentionBody
from gateway.faces.test_time import DeliberationBody


class ContentBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One block of content. Those of types that are not served are decoded to be refused by type."""

    type: str
    text: str | None = None
    # Of tool_use.
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    # Of tool_result.
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None
    # Of thinking, and of redacted_thinking.
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    # What SDKs copy from answers, and marks without effect.
    citations: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    caller: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    cache_control: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class TurnBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message."""

    role: str
    content: str | list[ContentBlock]


class ToolDefinition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool of the client's own; server tools are decoded to be refused by type."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    strict: bool | None = None
    # Whether arguments are sent as they come, valid or not.
    eager_input_streaming: bool | None = None
    cache_control: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class ToolChoiceOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tool_choice`."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`thinking`."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`output_config.format`."""

    type: str
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`output_config`."""

    effort: str | None = None
    format: OutputFormat | None = None


class MessageMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`metadata`."""

    user_id: str | None = None


class CountTokensBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a count: what the prompt is made of."""

    model: str
    messages: list[TurnBody]
    system: str | list[ContentBlock] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoiceOption | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    # The name that output_config.format had before.
    output_format: OutputFormat | None = None
    cache_control: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class MessagesBody(CountTokensBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a request for a message."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: MessageMetadata | None = None
    service_tier: str | None = None
    # Extensions, as in /v1/chat/completions.
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    include_timing: bool | None = None
    test_time: DeliberationBody | None = None
    kv: RetentionBody | None = None


# Strange keys of messages, blocks and tools are ignored.
TOLERANCE = Tolerance(
    {"messages": TurnBody, "system": ContentBlock, "tools": ToolDefinition},
    {TurnBody: {"content": ContentBlock}, ContentBlock: {"content": ContentBlock}},
)
MESSAGES = msgspec.json.Decoder(FIELDS.declared_in(MessagesBody))
COUNT_TOKENS = msgspec.json.Decoder(FIELDS.declared_in(CountTokensBody))
