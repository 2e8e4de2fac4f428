"""Checks every number and list of a request against its limit, by the caller's own field name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from operator import attrgetter

from gateway.pipeline.request import (
    ChoiceFormat,
    Conversation,
    GenerationRequest,
    JsonSchemaFormat,
    Message,
    Role,
    TextPrompt,
    TokenPrompt,
    ToolChoiceMode,
)
from services.errors import MillraceError, Reason

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_MESSAGES = 4096
MAX_TOOLS = 256
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_PROMPT_CACHE_KEY = 256
# Seeds travel as unsigned 64-bit numbers.
MAX_SEED = 2**64 - 1
MAX_TOKENS = 2**31 - 1

# Of tools and of schemas, as OpenAI has it.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

# Field: (lowest, highest).
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 10),
    "top_k": (0, 2**31 - 1),
    "seed": (0, MAX_SEED),
    "max_tokens": (0, MAX_TOKENS),
    "min_tokens": (0, MAX_TOKENS),
    "n": (1, MAX_CHOICES),
    "best_of": (1, MAX_CHOICES),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "beam_width": (1, 64),
}
_numbers = attrgetter(*RANGES)

# Options that beams do not know, and the value that asks for nothing.
_NEUTRAL: Mapping[str, object] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
}


def refuse(request: GenerationRequest, name: str, problem: str) -> MillraceError:
    """An INVALID_ARGUMENT that names the field in the caller's terms."""
    field = request.field(name)
    return MillraceError(Reason.INVALID_ARGUMENT, f"{field}: {problem}", field=field)


def validate(request: GenerationRequest) -> None:
    """Raises INVALID_ARGUMENT for the first field that is out of its limits."""
    _check_numbers(request)
    _check_stops(request)
    _check_token_lists(request)
    _check_combinations(request)
    _check_prompt(request)
    _check_format(request)
    if len(request.prompt_cache_key) > MAX_PROMPT_CACHE_KEY:
        raise refuse(
            request,
            "prompt_cache_key",
            f"{len(request.prompt_cache_key)} characters; the limit is {MAX_PROMPT_CACHE_KEY}",
        )


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raises INVALID_ARGUMENT for labels that are too many or too long. Both faces call them metadata."""
    if len(metadata) > MAX_METADATA:
        raise MillraceError(
            Reason.INVALID_ARGUMENT,
            f"metadata: {len(metadata)} entries; the limit is {MAX_METADATA}",
            field="metadata",
        )
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            field = f"metadata.{key[:MAX_METADATA_KEY]}"
            raise MillraceError(
                Reason.INVALID_ARGUMENT,
                f"{field}: keys have at most {MAX_METADATA_KEY} characters and values {MAX_METADATA_VALUE}",
                field=field,
            )


def _check_numbers(request: GenerationRequest) -> None:
    sampling = request.sampling
    for value, name in zip(_numbers(sampling), RANGES, strict=True):
        if value is not None:
            lowest, highest = RANGES[name]
            if not lowest <= value <= highest:
                raise refuse(request, name, f"{value} is not between {lowest} and {highest}")
    if sampling.top_p == 0.0:
        raise refuse(request, "top_p", "0 would keep no token; use temperature 0 for greedy decoding")


def _check_stops(request: GenerationRequest) -> None:
    stop = request.sampling.stop
    if len(stop) > MAX_STOP_STRINGS:
        raise refuse(request, "stop", f"{len(stop)} strings; the limit is {MAX_STOP_STRINGS}")
    for text in stop:
        if not text:
            raise refuse(request, "stop", "an empty string would stop at once; leave it out")
        if len(text) > MAX_STOP_CHARACTERS:
            raise refuse(
                request, "stop", f"a string of {len(text)} characters; the limit is {MAX_STOP_CHARACTERS}"
            )


def _check_token_lists(request: GenerationRequest) -> None:
    sampling = request.sampling
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        raise refuse(
            request, "logit_bias", f"{len(sampling.logit_bias)} entries; the limit is {MAX_LOGIT_BIAS}"
        )
    for token_id, bias in sampling.logit_bias.items():
        if not math.isfinite(bias) or not -100.0 <= bias <= 100.0:
            raise refuse(request, "logit_bias", f"{bias:g} for token {token_id} is not between -100 and 100")


def check_token_ids(request: GenerationRequest, vocabulary_size: int) -> None:
    """Raises INVALID_ARGUMENT for ids outside the vocabulary, wherever the request names some."""
    sampling = request.sampling
    prompt = request.prompt.token_ids if isinstance(request.prompt, TokenPrompt) else ()
    named: Sequence[tuple[str, Sequence[int]]] = (
        ("logit_bias", tuple(sampling.logit_bias)),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("stop_token_ids", sampling.stop_token_ids),
        ("prompt", prompt),
    )
    for name, ids in named:
        if ids and not (min(ids) >= 0 and max(ids) < vocabulary_size):
            worst = max(ids) if max(ids) >= vocabulary_size else min(ids)
            raise refuse(
                request, name, f"token id {worst} is outside the vocabulary of {vocabulary_size} tokens"
            )


def _check_combinations(request: GenerationRequest) -> None:
    sampling = request.sampling
    if sampling.max_tokens == 0 and not request.echo:
        raise refuse(request, "max_tokens", "0 generates nothing; ask for at least 1, or set echo")
    if sampling.min_tokens and sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise refuse(
            request, "min_tokens", f"{sampling.min_tokens} is more than max_tokens {sampling.max_tokens}"
        )
    n = sampling.n or 1
    if sampling.best_of is not None and sampling.best_of < n:
        raise refuse(request, "best_of", f"{sampling.best_of} is less than n {n}")
    # gRPC has streams alone, and an answer in one piece is one.
    in_pieces = request.streaming and request.face != "grpc"
    if sampling.best_of is not None and sampling.best_of > n and in_pieces:
        raise refuse(request, "best_of", "the best answers are known at the end only; it cannot be streamed")
    if sampling.beam_width is not None and n > sampling.beam_width:
        raise refuse(request, "beam_width", f"{sampling.beam_width} beams cannot give n {n} answers")
    if sampling.beam_width is not None:
        _check_beams(request)
    if sampling.temperature == 0.0 and n > 1 and sampling.beam_width is None:
        raise refuse(request, "n", f"{n} greedy answers would be equal; use a temperature above 0, or n 1")


def _check_beams(request: GenerationRequest) -> None:
    """Beams are ranked by the model's own log-probabilities: what changes those would have no effect."""
    for name, neutral in _NEUTRAL.items():
        if getattr(request.sampling, name) not in (None, neutral):
            raise refuse(request, name, "it has no effect on a search with beam_width; leave one of them out")


def _check_prompt(request: GenerationRequest) -> None:
    prompt = request.prompt
    match prompt:
        case Conversation():
            check_conversation(request, prompt)
        case TextPrompt(text=text) if not text:
            raise refuse(request, "prompt", "it is empty; give at least one character")
        case TokenPrompt(token_ids=ids) if not ids:
            raise refuse(request, "prompt", "it is empty; give at least one token id")
        case _:
            pass


def check_conversation(request: GenerationRequest, conversation: Conversation) -> None:
    """Raises INVALID_ARGUMENT for the first part of a conversation that is out of its limits."""
    messages = conversation.messages
    if not messages:
        raise refuse(request, "messages", "it is empty; give at least one message")
    if len(messages) > MAX_MESSAGES:
        raise refuse(request, "messages", f"{len(messages)} messages; the limit is {MAX_MESSAGES}")
    for index, message in enumerate(messages):
        _check_message(request, message, f"messages[{index}]")
    if len(conversation.tools) > MAX_TOOLS:
        raise refuse(request, "tools", f"{len(conversation.tools)} tools; the limit is {MAX_TOOLS}")
    _check_tool_choice(request, conversation)


def _check_message(request: GenerationRequest, message: Message, field: str) -> None:
    if message.role is Role.TOOL and not message.tool_call_id:
        raise refuse(request, f"{field}.tool_call_id", "a tool message names the call it answers")
    if message.role is not Role.TOOL and message.tool_call_id:
        raise refuse(request, f"{field}.tool_call_id", "only tool messages answer a call; leave it out")
    if message.role is not Role.ASSISTANT and message.tool_calls:
        raise refuse(request, f"{field}.tool_calls", "only assistant messages call tools; leave them out")
    if message.role is not Role.ASSISTANT and message.reasoning:
        raise refuse(request, f"{field}.reasoning", "only assistant messages reason; leave it out")
    for index, call in enumerate(message.tool_calls):
        if not call.name:
            raise refuse(
                request, f"{field}.tool_calls[{index}].function.name", "it is empty; name the tool called"
            )


def _check_tool_choice(request: GenerationRequest, conversation: Conversation) -> None:
    choice = conversation.tool_choice
    names = [tool.name for tool in conversation.tools]
    for index, name in enumerate(names):
        if not _NAME.fullmatch(name):
            raise refuse(
                request,
                f"tools[{index}].function.name",
                f"{name[:80]!r} is not a name; use 1 to 64 of letters, digits, '_' and '-'",
            )
        if name in names[:index]:
            raise refuse(request, f"tools[{index}].function.name", f"{name!r} is there twice")
    if choice is None or choice.mode in (ToolChoiceMode.NONE, ToolChoiceMode.AUTO):
        return
    if not names:
        raise refuse(request, "tool_choice", f"{choice.mode} needs tools, and none are given")
    if choice.mode is ToolChoiceMode.NAMED and choice.name not in names:
        raise refuse(request, "tool_choice", f"{choice.name!r} is not one of the tools: {', '.join(names)}")
    if request.response_format is not None:
        raise refuse(
            request,
            "tool_choice",
            f"{choice.mode} and a response format exclude each other; give one of them",
        )


def _check_format(request: GenerationRequest) -> None:
    format_ = request.response_format
    if request.sampling.ignore_eos and _constrained(request):
        raise refuse(
            request,
            "ignore_eos",
            "it has no effect beside a constraint, which says where the answer ends; leave one of them out",
        )
    if isinstance(format_, JsonSchemaFormat) and format_.name and not _NAME.fullmatch(format_.name):
        field = f"{request.field('response_format')}.name"
        raise MillraceError(
            Reason.INVALID_ARGUMENT,
            f"{field}: {format_.name[:80]!r} is not a name; use 1 to 64 of letters, digits, '_' and '-'",
            field=field,
        )
    if isinstance(format_, ChoiceFormat) and not all(format_.options):
        raise refuse(request, "response_format", "an option is empty")
    if isinstance(format_, ChoiceFormat) and not format_.options:
        raise refuse(request, "response_format", "no options are given")


def _constrained(request: GenerationRequest) -> bool:
    """Whether a grammar decides where the answer ends."""
    if request.response_format is not None:
        return True
    choice = request.prompt.tool_choice if isinstance(request.prompt, Conversation) else None
    return choice is not None and choice.mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED)
