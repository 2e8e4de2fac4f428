"""Who asks for what, until when, and the prompt made ready.

Options that a client leaves unset are None: the checkpoint's defaults are applied later.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from opentelemetry.trace import Span

from contract.chat import LeftOut, Prompt, ResponseFormat
from contract.errors import MillraceError, Reason
from contract.grammar import EnforcementReport, GrammarSpec
from contract.pooling import Task
from contract.retention import Retention
from contract.sampling import SamplingOptions
from gateway.types.deliberation import Deliberation

# `truncate_prompt_tokens`: to what the model has room for beside the answer.
FITTING = -1
# Characters of a client's own id that are kept.
MAX_CLIENT_REQUEST_ID = 128
# Entries of `metadata`.
MAX_METADATA = 16


class Identity(msgspec.Struct, frozen=True):
    """What authentication established about one request. Nothing in it comes from the client unchecked."""

    request_id: str
    tenant: str
    # Public identifier of the API key, or "jwt:<subject>"; never the secret.
    key_id: str
    # Tier that the request gets unless it asks for another one.
    tier: str
    # Separates prefix-cache entries between tenants.
    cache_salt: bytes = b""
    # Models that the key may use; empty means every model.
    allowed_models: tuple[str, ...] = ()
    # W3C trace context of the edge.
    traceparent: str = ""
    tracestate: str = ""
    # Moment after which nobody wants the answer, milliseconds since the Unix epoch; None means none.
    deadline_unix_ms: int | None = None
    # The request is a line of a batch: it runs behind all others, under the lowest tier.
    in_batch: bool = False


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """A verified caller and its call. Moments are monotonic seconds."""

    identity: Identity
    # When the call's first byte was read.
    received_s: float
    # Parent of this call's spans, with the request's identity for every span below.
    trace: Span
    # When nobody wants the answer any more.
    deadline_s: float | None = None
    # The client's own x-request-id, cut to a length that every span can carry.
    client_request_id: str = ""
    # How often the client has sent it before, by its own word.
    num_retries: int = 0
    # Ids of the ledger's rows of its requests, one after another, where a request that is computed again
    # shall have the row that it had.
    entry_ids: Iterator[str] | None = None
    # The context as it came (a message, which `auth` alone reads), of a call that somebody in front has
    # authenticated, counted and signed.
    context: Any = None

    def remaining_s(self) -> float:
        """Seconds until the deadline, at least 0; infinity without one."""
        return math.inf if self.deadline_s is None else max(0.0, self.deadline_s - time.monotonic())


# A prompt made ready by the tokenizer service.


class Encoded(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that nothing is generated for."""

    token_ids: Sequence[int]
    left_out: LeftOut | None = None


class PreparedText(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt of several."""

    num_tokens: int
    # Tokens that were cut off.
    num_left_out: int = 0
    # Where the second text of a pair begins, if the tokenizer tells them apart; else 0.
    second_start: int = 0


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine needs of a prompt."""

    token_ids: tuple[int, ...]
    # What is missing in them, where the request allows it.
    left_out: LeftOut | None = None
    grammar: GrammarSpec | None = None
    enforcement: EnforcementReport | None = None
    vocabulary_fingerprint: str = ""
    # Text that the template placed at the start of the assistant turn, for the output parsers.
    assistant_prefix: str = ""
    # Of a list of prompts, whose ids follow one another: each one.
    texts: tuple[PreparedText, ...] = ()


class PooledAsk(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a model that pools, whose request generates nothing."""

    task: Task = "embed"
    # Leading elements of an embedding; 0 is all.
    dimensions: int = 0
    # Name of an instruction of the model's that the text begins with; None: the model's default, "": none.
    prompt_name: str | None = None
    # What is cut of a text beyond the model's window, in Cohere's words; None: what the model's files say.
    truncate: Literal["NONE", "START", "END"] | None = None
    # How the caller calls each prompt, as in "input[3]".
    names: tuple[str, ...] = ()


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of either face."""

    model: str
    prompt: Prompt
    sampling: SamplingOptions = SamplingOptions()
    response_format: ResponseFormat | None = None
    # The prompt is read, and nothing generated.
    pooling: PooledAsk | None = None
    # One answer is chosen among several samples.
    test_time: Deliberation | None = None
    # What the answer may forget of its keys and values; None: what the tier says.
    retention: Retention | None = None
    service_tier: str = ""
    # Requests with the same one had better meet on one engine.
    prompt_cache_key: str = ""
    # Prefixes are shared with the tenant's requests of the same salt alone; None is the salt of all others.
    cache_salt: str | None = None
    # A longer prompt loses what is oldest instead of being refused; None: it is refused.
    truncate_prompt_tokens: int | None = None
    metadata: Mapping[str, str] = {}
    # Whether a cheaper model may answer before the request is refused for load.
    allow_fallback: bool = True
    # Where max_tokens are more than the model has room for, the answer ends with the room and is not refused.
    fills_context: bool = False
    # Return the prompt before the completion.
    echo: bool = False
    streaming: bool = True
    # Prompts that came together with this one, itself included, where it is the first; 0 where it is another:
    # the first one takes the streams of all.
    num_prompts: int = 1
    # Beginning of the answer's id; "" for the one of OpenAI's that the prompt has.
    id_prefix: str = ""
    # For metrics: http or grpc.
    face: str = "http"
    # Characters of a tool's name, by the API's rule.
    max_tool_name: int = 64
    # Our field name to the face's own, for error messages; and parts of names such as ".function.name".
    field_names: Mapping[str, str] = {}
    field_parts: Mapping[str, str] = {}

    @property
    def num_streams(self) -> int:
        """Sequences that it has under way at a time, those that came together with it included."""
        return self.num_prompts * self.branches[1]

    @property
    def branches(self) -> tuple[str, int]:
        """See SamplingOptions; samples are sequences, too."""
        if self.test_time is not None:
            return "test_time.samples", self.test_time.num_samples
        return self.sampling.branches

    def field(self, name: str) -> str:
        """The name under which the caller knows a field, or a part of one as in "messages[0].role"."""
        head, rest = _split(name)
        if head == "texts" and self.pooling is not None:
            head, rest = _of_text(self.pooling.names, rest)
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
        elif known not in message and error.reason is not Reason.CONTEXT_LENGTH_EXCEEDED:
            # That one begins as OpenAI's does.
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
    "retention": "kv",
}


def _of_text(names: Sequence[str], rest: str) -> tuple[str, str]:
    """The caller's name for a prompt, of "[3]", and what follows that."""
    index, _, after = rest.removeprefix("[").partition("]")
    return (names[int(index)], after) if index.isdigit() else ("prompt", rest)


def _split(field: str) -> tuple[str, str]:
    """ "messages" and "[0].role" of "messages[0].role"."""
    for index, character in enumerate(field):
        if character in ".[":
            return field[:index], field[index:]
    return field, ""
