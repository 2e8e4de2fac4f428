"""Every answer of the face as a type, from which the OpenAPI document derives its schema.

Small answers are written as these types. Those of the generating endpoints are written piece by piece
(`answers`, `logprobs`), because an event has to cost little; tests hold what is written to the types.
A field that is not always there is UNSET by default; every other field is always written.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from contract.chat import LeftOut
from contract.errors import Reason
from contract.grammar import KeywordStatus, Verdict
from gateway.faces.retention import KvUsage
from gateway.faces.timings import Timings
from gateway.types.deliberation import Deliberated

Natural: TypeAlias = Annotated[int, Meta(ge=0)]
_CODES = sorted({reason.openai_code for reason in Reason})
Code: TypeAlias = Annotated[str, Meta(extra_json_schema={"enum": _CODES})]
End: TypeAlias = Literal["stop", "length", "tool_calls"]


class ErrorDetail(Struct, frozen=True):
    """`message` tells what happened, the limit and the remedy; `reason` is the error table's own name."""

    message: str
    type: str
    param: str | None
    code: Code
    reason: Reason
    metadata: dict[str, str] | UnsetType = UNSET


class Error(Struct, frozen=True):
    error: ErrorDetail


class CachedTokens(Struct, frozen=True):
    cached_tokens: Natural


class ReasoningTokens(Struct, frozen=True):
    reasoning_tokens: Natural


class UsageBody(Struct, frozen=True):
    """Tokens of the request; `time_to_first_token` has its parts in milliseconds."""

    prompt_tokens: Natural
    completion_tokens: Natural
    total_tokens: Natural
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens
    time_to_first_token: dict[str, float] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    test_time: Deliberated | UnsetType = UNSET
    kv: KvUsage | UnsetType = UNSET


class ChatToken(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[Natural]


class DrawnToken(ChatToken, frozen=True):
    """A token of the answer, with the most probable ones at its position."""

    top_logprobs: list[ChatToken]


class ChatLogprobsBody(Struct, frozen=True):
    content: list[DrawnToken]
    refusal: None


class CompletionLogprobsBody(Struct, frozen=True):
    """Log-probabilities of a completion. The first token of an echoed prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Natural]


class CalledFunction(Struct, frozen=True):
    name: str
    arguments: str


class CalledTool(Struct, frozen=True):
    id: str
    type: Literal["function"]
    function: CalledFunction


class FunctionPiece(Struct, frozen=True):
    """A piece of the arguments; the first one has the name."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallPiece(Struct, frozen=True):
    """What an event adds to a tool call; the first one has id and type."""

    index: Natural
    function: FunctionPiece
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatMessage(Struct, frozen=True):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET


class ChatDelta(Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPiece] | UnsetType = UNSET


class _Choice(Struct, frozen=True, kw_only=True):
    index: Natural
    finish_reason: End
    # The stop string that ended the choice.
    stop_reason: str | None
    # Only in complete answers whose schema was not enforced wholly.
    verdict: Verdict | UnsetType = UNSET
    # Where truncation has left out some of the choice's prompt.
    left_out: LeftOut | UnsetType = UNSET


class ChatChoice(_Choice, frozen=True, kw_only=True):
    message: ChatMessage
    logprobs: ChatLogprobsBody | None


class CompletionChoice(_Choice, frozen=True, kw_only=True):
    text: str
    logprobs: CompletionLogprobsBody | None


class _ChoicePiece(Struct, frozen=True, kw_only=True):
    index: Natural
    finish_reason: End | None
    stop_reason: str | UnsetType = UNSET
    verdict: Verdict | UnsetType = UNSET
    # In the choice's last event.
    left_out: LeftOut | UnsetType = UNSET


class ChatChoicePiece(_ChoicePiece, frozen=True, kw_only=True):
    delta: ChatDelta
    logprobs: ChatLogprobsBody | None


class CompletionChoicePiece(_ChoicePiece, frozen=True, kw_only=True):
    text: str
    logprobs: CompletionLogprobsBody | None


class Enforcement(Struct, frozen=True):
    """The keywords of a schema that are enforced partly, and those that are not."""

    approximated: tuple[KeywordStatus, ...]
    unenforced: tuple[KeywordStatus, ...]


class _Generated(Struct, frozen=True, kw_only=True):
    id: str
    created: Natural
    model: str
    service_tier: str
    # Only in answers whose response format is not enforced exactly.
    enforcement: Enforcement | UnsetType = UNSET


class ChatCompletion(_Generated, frozen=True, kw_only=True):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageBody


class Completion(_Generated, frozen=True, kw_only=True):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageBody


class ChatCompletionChunk(_Generated, frozen=True, kw_only=True):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChoicePiece]
    usage: UsageBody | UnsetType | None = UNSET


class CompletionChunk(_Generated, frozen=True, kw_only=True):
    object: Literal["text_completion"]
    choices: list[CompletionChoicePiece]
    usage: UsageBody | UnsetType | None = UNSET


class SamplingDefault(Struct, frozen=True):
    """A sampling option of requests that say nothing of it, and who says it instead."""

    value: int | float
    source: str


class ModelCard(Struct, frozen=True, kw_only=True):
    """A model, or an adapter of one; `max_model_len` is unknown while no engine is attached.
    `sampling_defaults` are those that are not the API's own. Of a model that is loaded
    on demand, `state` says whether it is.
    """

    id: str
    object: Literal["model"] = "model"
    created: Natural
    owned_by: str = "millrace"
    max_model_len: int | None
    sampling_defaults: dict[str, SamplingDefault]
    # "generate"; or, of a model that pools what it reads, "embed", "score", "classify".
    tasks: list[str]
    state: Literal["unloaded", "loading", "loaded", "unloading"] | UnsetType = UNSET


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(Struct, frozen=True):
    count: Natural
    max_model_len: int | None
    tokens: list[Natural]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizedText(Struct, frozen=True):
    prompt: str


class AdapterCard(Struct, frozen=True):
    """An adapter, its model, and the folder that engines have read it from."""

    id: str
    parent: str
    root: str


class AdapterList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[AdapterCard]


class Done(Struct, frozen=True):
    message: str


# Whole bodies, and the data of events.
ANSWERS: tuple[type[Struct], ...] = (
    *(Error, ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk),
    *(ModelList, Tokens, DetokenizedText, AdapterList, Done),
)
