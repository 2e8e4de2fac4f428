"""What a client asks for, in plain data. Unset options are None: the checkpoint's defaults are applied
later.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec

from services.errors import MillraceError


class Role(StrEnum):
    """Who speaks. Names equal OpenAI's."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    DEVELOPER = "developer"


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the model made earlier."""

    id: str
    name: str
    arguments_json: str


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation."""

    role: Role
    content: str = ""
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call; `parameters_json` is its JSON Schema."""

    name: str
    description: str = ""
    parameters_json: str = ""
    strict: bool | None = None


class ToolChoiceMode(StrEnum):
    """Whether tools are called."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


class ToolChoice(msgspec.Struct, frozen=True):
    """`name` is set with NAMED only."""

    mode: ToolChoiceMode
    name: str = ""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a chat template renders."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # Extra variables of the template, JSON values.
    template_options: Mapping[str, Any] = {}
    documents: tuple[Mapping[str, Any], ...] = ()
    template_name: str = ""
    continue_final_message: bool | None = None

    @property
    def calls_tools(self) -> bool:
        """Whether tool calls are looked for in the answer."""
        return bool(self.tools) and (
            self.tool_choice is None or self.tool_choice.mode is not ToolChoiceMode.NONE
        )


class TextPrompt(msgspec.Struct, frozen=True):
    """A text to be continued."""

    text: str


class TokenPrompt(msgspec.Struct, frozen=True):
    """A prompt that is already encoded."""

    token_ids: tuple[int, ...]


Prompt: TypeAlias = Conversation | TextPrompt | TokenPrompt


class JsonObjectFormat(msgspec.Struct, frozen=True):
    """Any JSON object."""


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    """An answer that satisfies a JSON Schema; `strict` None means true."""

    schema_json: str
    name: str = ""
    strict: bool | None = None


class RegexFormat(msgspec.Struct, frozen=True):
    """The whole answer matches."""

    pattern: str


class ChoiceFormat(msgspec.Struct, frozen=True):
    """The answer is one of these texts."""

    options: tuple[str, ...]


class LarkFormat(msgspec.Struct, frozen=True):
    """A Lark grammar as understood by llguidance."""

    grammar: str


class EbnfFormat(msgspec.Struct, frozen=True):
    """A grammar in the GBNF dialect."""

    grammar: str


ResponseFormat: TypeAlias = (
    JsonObjectFormat | JsonSchemaFormat | RegexFormat | ChoiceFormat | LarkFormat | EbnfFormat
)


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen, as far as the client said so. Field names are those of the public proto."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    n: int | None = None
    best_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    beam_width: int | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of either face."""

    model: str
    prompt: Prompt
    sampling: SamplingOptions = SamplingOptions()
    response_format: ResponseFormat | None = None
    service_tier: str = ""
    # Requests with the same one had better meet on one engine.
    prompt_cache_key: str = ""
    metadata: Mapping[str, str] = {}
    # Return the prompt before the completion.
    echo: bool = False
    streaming: bool = True
    # For metrics: http or grpc.
    face: str = "http"
    # Our field name to the face's own, for error messages; and parts of names such as ".function.name".
    field_names: Mapping[str, str] = {}
    field_parts: Mapping[str, str] = {}

    def field(self, name: str) -> str:
        """The name under which the caller knows a field, or a part of one as in "messages[0].role"."""
        head, rest = _split(name)
        known = self.field_names.get(head, head)
        if head == "response_format" and known != head:
            # The face has several names for a constraint, and has put down the one that was used.
            return name if name.startswith(f"{known}.") else known
        for part, own in self.field_parts.items():
            rest = rest.replace(part, own)
        return known + rest

    def tell(self, error: MillraceError) -> MillraceError:
        """A refusal of a service behind, in the caller's terms: services name their own protocols' fields, or
        leave the name out of the message.
        """
        if not error.field:
            return error
        head, rest = _split(error.field.removeprefix("sampling.").removeprefix("conversation."))
        known = self.field(_PROTOCOL_FIELDS.get(head, head) + rest)
        message = error.message
        if message.startswith(error.field):
            message = known + message.removeprefix(error.field)
        elif known not in message:
            message = f"{known}: {message}"
        return MillraceError(
            error.reason,
            message,
            field=known,
            metadata=error.metadata,
            retry_after_s=error.retry_after_s,
        )


# Fields of the protocols behind the gateway that have another name in GenerationRequest.
_PROTOCOL_FIELDS: Mapping[str, str] = {
    "prompt_token_ids": "prompt",
    "output_token_ids": "prompt",
    "grammar": "response_format",
    "adapter": "model",
}


def _split(field: str) -> tuple[str, str]:
    """ "messages" and "[0].role" of "messages[0].role"."""
    for index, character in enumerate(field):
        if character in ".[":
            return field[:index], field[index:]
    return field, ""
