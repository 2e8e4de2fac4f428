"""What a model is asked: conversations, prompts, tools, and the form that the answer must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, TypeAlias

import msgspec

# Beginnings of an answer's id over HTTP; the request's id follows.
CHAT_ID = "chatcmpl-"
COMPLETION_ID = "cmpl-"
MESSAGE_ID = "msg_"


_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class Role(StrEnum):
    """Who speaks. Names equal OpenAI's, and are what templates compare with."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    DEVELOPER = "developer"


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the model made in an earlier turn; `arguments_json` is JSON text."""

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
    """A function that the model may call; `parameters_json` is the JSON Schema of its arguments, or "".

    The text of its argument `input` follows `input_grammar`, where there is one, of `input_syntax`: lark or
    regex.
    """

    name: str
    description: str = ""
    parameters_json: str = ""
    strict: bool = False
    input_syntax: str = ""
    input_grammar: str = ""


class ToolChoiceMode(StrEnum):
    """Whether tools are called."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


class ToolChoice(msgspec.Struct, frozen=True):
    """`name` is set with NAMED only."""

    mode: ToolChoiceMode = ToolChoiceMode.AUTO
    name: str = ""

    @property
    def forces(self) -> bool:
        """Whether the answer must be a call."""
        return self.mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED)


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a chat template renders, and how the answer may use tools."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    # Extra variables of the template, JSON values.
    template_options: Mapping[str, Any] = {}
    documents: tuple[Mapping[str, Any], ...] = ()
    template_name: str = ""
    continue_final_message: bool = False

    @property
    def calls_tools(self) -> bool:
        """Whether tool calls are looked for in the answer."""
        return bool(self.tools) and self.tool_choice.mode is not ToolChoiceMode.NONE


# Whose messages belong to no turn.
_INSTRUCTING = (Role.SYSTEM, Role.DEVELOPER)


def turns_of(messages: Sequence[Message]) -> list[list[Message]]:
    """The turns of a conversation: what a user says, and what follows it, calls with their results."""
    turns: list[list[Message]] = []
    for message in messages:
        if message.role in _INSTRUCTING:
            continue
        if message.role is Role.USER or not turns:
            turns.append([])
        turns[-1].append(message)
    return turns


def without_oldest(conversation: Conversation, num_turns: int) -> Conversation:
    """The conversation without its oldest turns; instructions stay, wherever they stand."""
    dropped = {id(each) for turn in turns_of(conversation.messages)[:num_turns] for each in turn}
    messages = tuple(each for each in conversation.messages if id(each) not in dropped)
    return msgspec.structs.replace(conversation, messages=messages)


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """What truncation left out of a prompt: its first tokens, or its last ones, or the oldest turns of a
    conversation. A text has 0 turns.
    """

    num_tokens: _Count
    # Turns left out, and all that the conversation had.
    num_turns: _Count = 0
    of_turns: _Count = 0

    def told(self, num_kept: int, *, is_end: bool = False) -> str:
        """In words, of a prompt of which so many tokens are kept; `is_end` where its end was left out."""
        where = "last" if is_end else "first"
        what = f"{where} {self.num_tokens} of the prompt's {self.num_tokens + num_kept} tokens"
        if self.of_turns:
            what = f"oldest {self.num_turns} of {self.of_turns} turns"
        return f"truncation left out the {what}, which the model has not seen"


class TextPrompt(msgspec.Struct, frozen=True):
    """A text to be continued."""

    text: str
    # Whether the tokens are put around it that the tokenizer has for a plain text, such as one at its start.
    add_special_tokens: bool = True
    # The second text of a pair, for a model that reads both together.
    pair: str | None = None


class TokenPrompt(msgspec.Struct, frozen=True):
    """A prompt that is already encoded."""

    token_ids: tuple[int, ...]


class PromptList(msgspec.Struct, frozen=True):
    """Prompts for a model that pools, each read by itself."""

    prompts: tuple[TextPrompt | TokenPrompt, ...]


Prompt: TypeAlias = Conversation | TextPrompt | TokenPrompt | PromptList


class JsonObjectFormat(msgspec.Struct, frozen=True, tag="json_object"):
    """Any JSON object."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, tag="json_schema"):
    """A value that a JSON Schema describes; `strict` refuses what cannot be enforced exactly."""

    schema_json: str
    name: str = ""
    strict: bool = True


class RegexFormat(msgspec.Struct, frozen=True, tag="regex"):
    """The whole answer matches a regular expression (Rust `regex` syntax)."""

    pattern: str


class ChoiceFormat(msgspec.Struct, frozen=True, tag="choice"):
    """The answer is one of these texts."""

    options: tuple[str, ...]


class LarkFormat(msgspec.Struct, frozen=True, tag="lark"):
    """A Lark grammar as llguidance understands it."""

    grammar: str


class EbnfFormat(msgspec.Struct, frozen=True, tag="ebnf"):
    """A grammar in the GBNF dialect."""

    grammar: str


ResponseFormat: TypeAlias = (
    JsonObjectFormat | JsonSchemaFormat | RegexFormat | ChoiceFormat | LarkFormat | EbnfFormat
)
