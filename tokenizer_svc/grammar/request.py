"""What is compiled, as data that crosses to a worker process and back."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from tokenizer_svc.types import EnforcementReport, ResponseFormat, ToolChoiceMode, Verdict

# Library and payload version, as the engine checks it.
BACKEND = "llguidance/1"


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the model may call; `parameters` is the schema of its arguments, None for any object."""

    name: str
    parameters: dict[str, Any] | None = None
    strict: bool = False


class ToolRules(msgspec.Struct, frozen=True, kw_only=True):
    """Which calls the answer may, or must, consist of. With NAMED, `tools` holds the named one alone."""

    tools: tuple[ToolSpec, ...]
    mode: ToolChoiceMode
    parallel: bool
    # Name of the model's tool-call format (see formats.py), and the template text that tells its variants.
    format: str


class GrammarRequest(msgspec.Struct, frozen=True, kw_only=True, tag="grammar"):
    """Everything that a grammar depends on."""

    response_format: ResponseFormat | None = None
    tools: ToolRules | None = None
    # The prompt leaves a <think> block open: free reasoning precedes the constrained answer.
    reasoning_open: bool = False

    def key(self) -> bytes:
        """Content address of the request."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()


class ValidationRequest(msgspec.Struct, frozen=True, kw_only=True, tag="validation"):
    """Finished texts, and the schema as it was sent."""

    schema_json: str
    texts: tuple[str, ...]


# What workers do.
WorkRequest = GrammarRequest | ValidationRequest


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar that llguidance accepts, and what it enforces (None for formats other than schemas)."""

    payload: bytes
    enforcement: EnforcementReport | None = None
    compile_s: float = 0.0


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no grammar. `field` is the request field at fault."""

    message: str
    field: str
    # Budget that ran over ("time" or "memory"), and with it the worker; "" when the grammar is at fault.
    overrun: str = ""
    # What of a schema could have been enforced.
    enforcement: EnforcementReport | None = None


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """First message to a worker."""

    tokenizer_json: str
    eos_token_ids: tuple[int, ...]
    memory_limit_bytes: int
    max_schema_depth: int
    max_artifact_bytes: int


class WorkerReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of a worker: built, judged or refused."""

    built: Built | None = None
    verdicts: tuple[Verdict, ...] | None = None
    refused: Refused | None = None
    # Traceback of a failure that is the service's own.
    defect: str = ""
