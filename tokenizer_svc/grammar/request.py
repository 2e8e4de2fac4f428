"""What is compiled, as data that crosses to a worker process and back."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import msgspec
from msgspec.structs import replace

from contract.chat import LeftOut, ResponseFormat, ToolChoiceMode
from contract.errors import Reason
from contract.grammar import EnforcementReport, Verdict
from tokenizer_svc.config import PromptLimitsConfig
from tokenizer_svc.text.checkpoint import Checkpoint
from tokenizer_svc.types import Compiled, LengthLimit

# Library and payload version, as the engine checks it.
BACKEND = "llguidance/1"
# How msgpack writes no bytes, and how it begins any number of bytes.
_NO_BYTES = b"\xc4\x00"
_BYTES_MARK = 0xC6
_BYTES = struct.Struct(">BI")


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the model may call; `parameters_json` is the schema of its arguments, "" for none. A
    text, because numbers of JSON have any size and those of msgpack do not.

    The text of its one argument `input` follows `input_grammar`, where there is one: see
    `contract.chat.Tool`.
    """

    name: str
    parameters_json: str = ""
    strict: bool = False
    input_syntax: str = ""
    input_grammar: str = ""
    # Why any object is taken and nothing of the schema enforced; "" where that is not so.
    left_out: str = ""

    @property
    def parameters(self) -> dict[str, Any] | None:
        """The schema, read anew each time; None where there are none."""
        return json.loads(self.parameters_json) if self.parameters_json else None


class ToolRules(msgspec.Struct, frozen=True, kw_only=True):
    """Which calls the answer may, or must, consist of. With NAMED, `tools` holds the named one alone."""

    tools: tuple[ToolSpec, ...]
    mode: ToolChoiceMode
    parallel: bool
    # Name of the model's tool-call format (see formats.py), and the template text that tells its variants.
    format: str
    # Where the first of them stands among the tools of the request.
    first: int = 0

    def numbered(self) -> Iterator[tuple[int, ToolSpec]]:
        """Each with its place among the tools of the request."""
        return enumerate(self.tools, self.first)


class Reasoning(StrEnum):
    """Whether free thoughts between their tags precede the constrained answer."""

    NONE = "none"
    # The prompt has opened the block.
    OPEN = "open"
    # The model may open one.
    OPTIONAL = "optional"


class GrammarRequest(msgspec.Struct, frozen=True, kw_only=True, tag="grammar"):
    """Everything that a grammar depends on."""

    response_format: ResponseFormat | None = None
    tools: ToolRules | None = None
    reasoning: Reasoning = Reasoning.NONE
    # Whose tags stand around thoughts, see `contract.formats.REASONING`.
    reasoning_format: str = "think"

    @property
    def kind(self) -> str:
        """What is compiled, as a label: json_schema, regex, ...; "tools" where tools alone ask for it."""
        form = self.response_format
        return "tools" if form is None else str(form.__struct_config__.tag)

    @property
    def field(self) -> str:
        """The request's field that asks for it."""
        return self.kind if self.response_format is None else f"response_format.{self.kind}"

    def without_schemas(self, why: str) -> GrammarRequest | None:
        """The same with the schemas of tools left out that are not strict; None where there are none."""
        rules = self.tools
        lax = [each.parameters_json != "" and not each.strict for each in rules.tools] if rules else []
        if rules is None or not any(lax):
            return None
        tools = tuple(
            replace(tool, parameters_json="", left_out=why) if is_lax else tool
            for tool, is_lax in zip(rules.tools, lax, strict=True)
        )
        return replace(self, tools=replace(rules, tools=tools))

    def encoded(self) -> EncodedGrammar:
        """As it crosses to a worker."""
        payload = msgspec.msgpack.encode(self)
        return EncodedGrammar(payload=payload, kind=self.kind, key=hashlib.sha256(payload).digest())


class EncodedGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """A GrammarRequest encoded once: for its address, and for the worker."""

    payload: bytes
    # See GrammarRequest.
    kind: str
    # Content address of the request.
    key: bytes


class ValidationRequest(msgspec.Struct, frozen=True, kw_only=True, tag="validation"):
    """Finished texts, and the schema as it was sent."""

    schema_json: str
    texts: tuple[str, ...]


class PromptRequest(msgspec.Struct, frozen=True, kw_only=True, tag="prompt"):
    """How the prompt of a request is prepared, and, for a worker, the request."""

    with_grammar: bool = True
    length: LengthLimit = LengthLimit()
    tenant: str = ""
    # The tenant's, or that of a part of its requests: what is kept of turns is kept by it, too.
    salt: bytes = b""
    # millrace.tokenizer.v1.PrepareRequest as it came. The last field, see `encoded`.
    wire: memoryview = memoryview(b"")

    @property
    def turns_of(self) -> str:
        """Whose encoded turns are read and kept."""
        return f"{self.tenant}\0{self.salt.hex()}" if self.salt else self.tenant

    def encoded(self, wire: bytes, field: str) -> EncodedPrompt:
        """With this wire, as it crosses to a worker; errors name `field`."""
        rest = msgspec.msgpack.encode(self).removesuffix(_NO_BYTES)
        return EncodedPrompt(payload=(rest + _BYTES.pack(_BYTES_MARK, len(wire)), wire), field=field)


class EncodedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A PromptRequest in parts: to put them together would hold up everybody else."""

    payload: tuple[bytes | memoryview, ...]
    # Request field that holds the prompt.
    field: str


# Workers do these.
WorkRequest = GrammarRequest | ValidationRequest | PromptRequest


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar that llguidance accepts, and what it enforces (None for formats other than schemas)."""

    payload: bytes
    enforcement: EnforcementReport | None = None
    compile_s: float = 0.0


class EncodedText(msgspec.Struct, frozen=True, kw_only=True):
    """One text of several, as PreparedText has it."""

    num_tokens: int
    num_truncated_tokens: int = 0
    # Where the second text of a pair begins, if the tokenizer tells them apart; else 0.
    second_start: int = 0


class Prompted(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that is rendered and encoded; times in seconds."""

    # From a worker as they are sent (see `wire`), else as numbers.
    token_ids: list[int] | memoryview
    num_tokens: int
    left_out: LeftOut | None = None
    # On the monotonic clock, which all processes share.
    begin_s: float
    render_s: float = 0.0
    encode_s: float
    assistant_prefix: str = ""
    # Of a list of texts, whose ids follow one another: each one.
    texts: tuple[EncodedText, ...] = ()
    # None when the answer is free.
    grammar: EncodedGrammar | None = None


class PreparedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine and the output parsers need of a request."""

    prompt: Prompted
    compiled: Compiled | None = None
    grammar_cached: bool = False
    compile_s: float = 0.0


class WorkRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why the work was not done. `field` is the request field at fault."""

    message: str
    field: str
    # Budget that ran over ("time" or "memory"), and with it the worker; "" when the grammar is at fault.
    overrun: str = ""
    # The keywords of a schema that could have been enforced.
    enforcement: EnforcementReport | None = None
    reason: Reason = Reason.GRAMMAR_REFUSED
    metadata: dict[str, str] = {}


class GrammarRefused(Exception):
    """What is asked for cannot be enforced so; `field` is the request field at fault."""

    def __init__(self, message: str, field: str, enforcement: EnforcementReport | None = None) -> None:
        super().__init__(message)
        self.refused = WorkRefusal(message=message, field=field, enforcement=enforcement)


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """First message to a worker."""

    checkpoint: Checkpoint
    limits: PromptLimitsConfig
    memory_limit_bytes: int

    def encoded(self) -> bytes:
        """For the worker."""
        return msgspec.msgpack.encode(self, enc_hook=str)

    @staticmethod
    def decoded(payload: bytes | bytearray) -> WorkerSetup:
        """What `encoded` wrote."""
        return msgspec.msgpack.decode(payload, type=WorkerSetup, dec_hook=lambda kind, value: kind(value))


class WorkerReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of a worker: built, judged, prompted or refused."""

    built: Built | None = None
    prompted: Prompted | None = None
    verdicts: tuple[Verdict, ...] | None = None
    refused: WorkRefusal | None = None
    # Traceback of a failure that is the service's own.
    defect: str = ""
    # Processor time that the work took; 0 when the worker did not live to tell.
    processor_s: float = 0.0
