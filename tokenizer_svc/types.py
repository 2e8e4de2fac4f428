"""What the service works on: plain data, independent of the wire and of the libraries underneath."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec


class Role(StrEnum):
    """Who speaks; the value is what templates compare with."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the model made in an earlier turn; `arguments_json` is JSON text."""

    id: str
    name: str
    arguments_json: str


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn."""

    role: Role
    content: str = ""
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool = False


class ToolChoiceMode(StrEnum):
    """Whether the model has to call a tool."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a chat template renders, and how the answer may use tools."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoiceMode = ToolChoiceMode.AUTO
    # The tool that must be called, with ToolChoiceMode.NAMED.
    tool_choice_name: str = ""
    parallel_tool_calls: bool = True
    template_options: dict[str, Any] = {}
    documents: tuple[dict[str, Any], ...] = ()
    template_name: str = ""
    continue_final_message: bool = False


class JsonObjectFormat(msgspec.Struct, frozen=True, tag="json_object"):
    """Any JSON object."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, tag="json_schema"):
    """A value that a JSON schema describes; `strict` refuses what cannot be enforced exactly."""

    schema_json: str
    strict: bool = True


class RegexFormat(msgspec.Struct, frozen=True, tag="regex"):
    """The whole answer matches a regular expression (Rust `regex` syntax)."""

    pattern: str


class ChoiceFormat(msgspec.Struct, frozen=True, tag="choice"):
    """One of the given texts."""

    options: tuple[str, ...]


class LarkFormat(msgspec.Struct, frozen=True, tag="lark"):
    """A Lark grammar as llguidance understands it."""

    grammar: str


class EbnfFormat(msgspec.Struct, frozen=True, tag="ebnf"):
    """A GBNF grammar."""

    grammar: str


ResponseFormat = JsonObjectFormat | JsonSchemaFormat | RegexFormat | ChoiceFormat | LarkFormat | EbnfFormat


class KeywordStatus(msgspec.Struct, frozen=True):
    """A schema keyword, the JSON pointer to it, and why it is not (exactly) enforced."""

    keyword: str
    path: str
    note: str = ""


class EnforcementReport(msgspec.Struct, frozen=True):
    """What of a schema holds by construction."""

    enforced: tuple[KeywordStatus, ...] = ()
    approximated: tuple[KeywordStatus, ...] = ()
    unenforced: tuple[KeywordStatus, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether every keyword is enforced."""
        return not self.approximated and not self.unenforced


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled grammar. `digest` is the SHA-256 of payload and vocabulary fingerprint."""

    digest: str
    payload: bytes
    backend: str


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar with the report of what it enforces; there is none for formats other than schemas."""

    artifact: Artifact
    enforcement: EnforcementReport | None = None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a finished text matches a schema, and else what it breaks first (JSON pointers)."""

    valid: bool
    keyword: str = ""
    schema_path: str = ""
    instance_path: str = ""
    message: str = ""


class Truncation(StrEnum):
    """Which end of a prompt that is too long is kept."""

    REFUSE = "refuse"
    KEEP_END = "keep_end"
    KEEP_START = "keep_start"


class LengthLimit(msgspec.Struct, frozen=True):
    """How many tokens a prompt may have (None: any number), and what becomes of a longer one."""

    max_tokens: int | None = None
    truncation: Truncation = Truncation.REFUSE


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine and the output parsers need of a request; times in seconds."""

    # Those of a large prompt as they are sent (see `wire`), all others as numbers.
    token_ids: list[int] | memoryview
    num_tokens: int
    compiled: Compiled | None
    grammar_cached: bool
    assistant_prefix: str
    render_s: float
    encode_s: float
    compile_s: float
    num_truncated: int = 0
