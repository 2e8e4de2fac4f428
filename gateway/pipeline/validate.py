"""Checks every number and list of a request against its limit, by the caller's own field name."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from contract.chat import (
    ChoiceFormat,
    Conversation,
    JsonSchemaFormat,
    Message,
    Prompt,
    PromptList,
    Role,
    TextPrompt,
    TokenPrompt,
    ToolChoiceMode,
)
from contract.errors import MillraceError, Reason, context_length, invalid
from contract.retention import check as check_retention
from contract.sampling import (
    OPTIONS,
    Refuse,
    SamplingOptions,
    SamplingParams,
    check,
    check_beams_alone,
    check_ids,
    check_stops,
    check_token_ids,
    outside,
)
from gateway.config import DEFAULT_REQUEST_LIMITS, RequestConfig
from gateway.types.request import FITTING, MAX_METADATA, GenerationRequest

# From what the client set to complete sampling options: checkpoint's defaults, seed, and what fits.

_log = logging.getLogger(__name__)

# Numbers that a checkpoint's generation_config.json may set.
_CHECKPOINT_OPTIONS: Mapping[str, Any] = {
    name: each.kind
    for name, each in OPTIONS.items()
    if each.limits.per == "token" and each.kind in (int, float)
}


def checkpoint_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling options that the checkpoint recommends.

    `do_sample` false is greedy decoding, temperature 0: numbers beside it that say how tokens are drawn are
    leftovers, which transformers ignores as well. A number beyond its limits is left out, which is logged:
    every request would be refused for it.
    """
    found: dict[str, Any] = {}
    is_greedy = generation_config.get("do_sample") is False
    if is_greedy:
        found["temperature"] = 0.0
    for name, kind in _CHECKPOINT_OPTIONS.items():
        if is_greedy and not name.endswith("_penalty"):
            continue
        value = generation_config.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                check(SamplingParams(**{name: kind(value)}), invalid)
            except MillraceError as error:
                _log.warning("generation_config.json is not followed: %s", error.message)
            else:
                found[name] = kind(value)
    return found


def token_limit(max_model_len: int, max_context_tokens: int | None) -> int:
    """Longest prompt plus completion: the model's limit, or the tier's when that is lower."""
    return max_model_len if max_context_tokens is None else min(max_model_len, max_context_tokens)


def outlives_positions(request: GenerationRequest) -> bool:
    """Whether the answer may be longer than the model has positions: by what it forgets."""
    asked = request.retention
    return asked is not None and asked.outlives_positions and not request.sampling.beam_width


def completion_limit(
    request: GenerationRequest, num_prompt_tokens: int, limit: int, beyond: int | None = None
) -> int:
    """Tokens that may be generated per choice; raises CONTEXT_LENGTH_EXCEEDED with the numbers. For an answer
    of a given length that may outlive the model's positions `beyond` takes the place of `limit`; None: it may
    have that length.
    """
    asked = request.sampling.max_tokens
    allowance = limit - num_prompt_tokens
    if allowance >= 1 and asked is not None and outlives_positions(request):
        limit = max(limit, num_prompt_tokens + asked) if beyond is None else beyond
        allowance = limit - num_prompt_tokens
    if allowance >= 1 and (asked is None or asked <= allowance or request.fills_context):
        return allowance if asked is None else min(asked, allowance)
    metadata = {"prompt_tokens": str(num_prompt_tokens), "max_context_tokens": str(limit)}
    if allowance < 1:
        field = request.field("prompt")
        problem = f"the prompt has {num_prompt_tokens} tokens, and the completion needs at least 1; "
        problem += "shorten the prompt"
    else:
        field, metadata["max_tokens"] = request.field("max_tokens"), str(asked)
        problem = f"the prompt has {num_prompt_tokens} tokens and {asked} more were asked for; "
        problem += f"ask for at most {allowance}, or shorten the prompt"
        if request.retention is not None and request.retention.forgets and not outlives_positions(request):
            problem += "; kv lets an answer be longer under window+sinks alone, "
            problem += "without max_lost, if_possible and beams"
    raise MillraceError(
        Reason.CONTEXT_LENGTH_EXCEEDED, context_length(limit, problem), field=field, metadata=metadata
    )


def complete(
    sampling: SamplingOptions,
    *,
    defaults: Mapping[str, Any],
    max_tokens: int,
    eos_token_ids: tuple[int, ...],
    watches_ids: bool = False,
) -> SamplingParams:
    """Every option set. Without a seed one is drawn, so that an interrupted request can continue. The engine
    is not told of ids that the gateway watches for itself.
    """
    n = sampling.n or 1
    ends = () if sampling.ignore_eos else eos_token_ids
    if not watches_ids:
        ends = (*ends, *sampling.stop_token_ids)
    options: dict[str, Any] = {
        "best_of": n,
        **defaults,
        **sampling.given(),
        "seed": secrets.randbits(63) if sampling.seed is None else sampling.seed % 2**64,
        # The step that computes the prompt always samples; the token is dropped when none was asked for.
        "max_tokens": max(max_tokens, 1),
    }
    return SamplingParams(
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=sampling.allowed_token_ids,
        stop_token_ids=tuple(dict.fromkeys(ends)),
        **options,
    )


def shortened(sampling: SamplingParams, max_tokens: int) -> SamplingParams:
    """The same for answers of at most so many tokens."""
    return replace(sampling, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens))


MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_PROMPT_CACHE_KEY = 256
MAX_CACHE_SALT = 256
# Part of the context that is left to an answer of which no length was said, where the prompt is cut to fit.
_ANSWER_PART = 8
# Names of tools and of schemas, by OpenAI's rule.
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ANY_NAME = re.compile(r"[A-Za-z0-9_-]+")


class SizedConversation(msgspec.Struct, frozen=True, kw_only=True):
    """How many of what a conversation has, counted before anything is made of it."""

    num_messages: int
    num_parts: int = 0
    num_tool_calls: int = 0
    num_tools: int = 0


def refuse(request: GenerationRequest, name: str, problem: str) -> MillraceError:
    """An INVALID_ARGUMENT that names the field in the caller's terms."""
    return invalid(request.field(name), problem)


def validate(request: GenerationRequest, limits: RequestConfig = DEFAULT_REQUEST_LIMITS) -> None:
    """Raises INVALID_ARGUMENT for the first field that is out of its limits."""
    refused = partial(refuse, request)
    check_answers(request, 1, limits)
    _check_ids(request, limits, refused)
    _check_sampling(request, refused)
    _check_prompt(request, refused)
    _check_format(request, refused)
    if (length := len(request.prompt_cache_key)) > MAX_PROMPT_CACHE_KEY:
        raise refused("prompt_cache_key", f"{length} characters; the limit is {MAX_PROMPT_CACHE_KEY}")
    if (salt := request.cache_salt) is not None:
        if not salt:
            problem = "it is empty; give at least one character, or leave it out"
            raise refused("cache_salt", f"{problem} to share prefixes with the tenant's other requests")
        if len(salt) > MAX_CACHE_SALT:
            raise refused("cache_salt", f"{len(salt)} characters; the limit is {MAX_CACHE_SALT}")
    check_cut(request)
    if request.retention is not None:
        check_retention(request.retention, refused)


def check_cut(request: GenerationRequest) -> None:
    """Raises INVALID_ARGUMENT for a length to which no prompt can be cut."""
    asked = request.truncate_prompt_tokens
    if asked is not None and asked != FITTING and asked < 1:
        problem = f"{asked} tokens; give at least 1, or {FITTING} for what the model has room for"
        raise refuse(request, "truncate_prompt_tokens", problem)


def prompt_limit(request: GenerationRequest, limit: int) -> int:
    """Tokens that the prompt may have where prompt and completion have `limit`; 0 where that is unknown.

    Raises INVALID_ARGUMENT for a prompt that is to be cut to more than that.
    """
    asked = request.truncate_prompt_tokens
    if asked is None or not limit:
        return limit
    if asked != FITTING:
        if asked > limit:
            problem = f"{asked} tokens; the model and the tier have room for {limit}"
            raise refuse(request, "truncate_prompt_tokens", f"{problem}: ask for fewer, or for {FITTING}")
        return asked
    answer = limit // _ANSWER_PART
    if request.sampling.max_tokens is not None:
        # An answer that ends with the room need not have all that it may have.
        most = answer if request.fills_context or outlives_positions(request) else limit
        answer = min(request.sampling.max_tokens, most)
    # Where nothing is left to the prompt, the numbers are told by who counts its tokens.
    return limit - max(answer, 1) if answer < limit else limit


def uncut(request: GenerationRequest, error: MillraceError, limit: int, room: int) -> MillraceError:
    """The refusal of a prompt that has more than `room` tokens though all was left out that may be, where the
    model and the tier have `limit`. Who counts the tokens knows of `room` alone.
    """
    if error.reason is not Reason.CONTEXT_LENGTH_EXCEEDED or request.truncate_prompt_tokens is None:
        return error
    num_tokens, field = error.metadata.get("prompt_tokens", ""), error.field
    least = "at least " if "at least" in error.message else ""
    problem = f"the prompt has {least}{num_tokens} tokens without all that may be left out of it"
    if request.truncate_prompt_tokens != FITTING:
        name = request.field("truncate_prompt_tokens")
        problem += f", and {name} allows {room}; ask for more, or shorten the last turn"
    elif num_tokens.isdigit() and int(num_tokens) < limit and request.sampling.max_tokens is not None:
        field = request.field("max_tokens")
        problem += f", and {field} {request.sampling.max_tokens} leaves room for {room}; ask for fewer"
    else:
        problem += f", and {limit - room} are kept for the answer; shorten the last turn"
    metadata = {**error.metadata, "max_context_tokens": str(limit)}
    return MillraceError(error.reason, context_length(limit, problem), field=field, metadata=metadata)


def check_answers(request: GenerationRequest, num_prompts: int, limits: RequestConfig) -> None:
    """Raises INVALID_ARGUMENT for more answers than one request may have computed."""
    name, num_each = request.branches
    if num_prompts * num_each > limits.max_answers:
        raise refuse(
            request,
            name,
            f"{_answers(num_prompts, num_each)}; the limit is {limits.max_answers} answers in all: "
            + ("send fewer prompts in one request, or " if num_prompts > 1 else "")
            + "ask for fewer answers",
        )


def _answers(num_prompts: int, num_each: int) -> str:
    return (
        f"{num_each} answers" if num_prompts == 1 else f"{num_prompts} prompts with {num_each} answers each"
    )


def check_streams(request: GenerationRequest, limit: int, whose: str) -> None:
    """Raises INVALID_ARGUMENT for more sequences than may ever run at a time under a limit of somebody."""
    name, num_each = request.branches
    if request.num_streams <= limit:
        return
    remedy = "ask for fewer"
    if num_each <= limit:
        name, remedy = "prompt", "send fewer prompts in one request"
    raise refuse(
        request,
        name,
        f"{_answers(request.num_prompts, num_each)} are {request.num_streams} streams at a time; the limit "
        f"is {limit} ({whose}): {remedy}",
    )


def ranked_tokens(request: GenerationRequest, max_tokens: int, limits: RequestConfig) -> int:
    """Tokens that each answer may have, where so many are possible: of ranked answers all log-probabilities
    come at once. Fewer where the client has set no length; raises INVALID_ARGUMENT where it has.
    """
    sampling = request.sampling
    n = sampling.n or 1
    if sampling.logprobs is None or not (sampling.beam_width or (sampling.best_of or n) > n):
        return max_tokens
    each = n * (1 + sampling.logprobs)
    most = limits.max_ranked_logprobs // each
    if max_tokens <= most:
        return max_tokens
    least = max(1, sampling.min_tokens or 0)
    if sampling.max_tokens is None and least <= most:
        return most
    num_tokens = sampling.max_tokens or least
    raise refuse(
        request,
        "logprobs",
        f"{n} answers of {num_tokens} tokens would have {num_tokens * each} log-probabilities, which come "
        f"all at once where answers are ranked; the limit is {limits.max_ranked_logprobs}: ask for fewer "
        "tokens, answers or alternatives",
    )


def check_counts(
    conversation: SizedConversation, limits: RequestConfig, field: Callable[[str], str] = str
) -> None:
    """Raises INVALID_ARGUMENT for a conversation of too many parts, by the caller's name for the field."""
    for name, what, count, limit in (
        ("messages", "messages", conversation.num_messages, limits.max_messages),
        ("messages", "parts", conversation.num_parts, limits.max_parts),
        ("messages", "tool calls", conversation.num_tool_calls, limits.max_tool_calls),
        ("tools", "tools", conversation.num_tools, limits.max_tools),
    ):
        if count > limit:
            raise invalid(field(name), f"{count} {what}; the limit is {limit}: send fewer in one request")


def _check_ids(request: GenerationRequest, limits: RequestConfig, refused: Refuse) -> None:
    sampling = request.sampling
    for name, ids in (
        *_given_ids(request.prompt),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("stop_token_ids", sampling.stop_token_ids),
    ):
        if len(ids) > limits.max_token_ids:
            raise refused(name, f"{len(ids)} token ids; the limit is {limits.max_token_ids}: send fewer")


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raises INVALID_ARGUMENT for labels that are too many or too long. Both faces call them metadata."""
    if len(metadata) > MAX_METADATA:
        raise invalid("metadata", f"{len(metadata)} entries; the limit is {MAX_METADATA}")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise invalid(
                f"metadata.{key[:MAX_METADATA_KEY]}",
                f"keys have at most {MAX_METADATA_KEY} characters and values {MAX_METADATA_VALUE}",
            )


def _check_sampling(request: GenerationRequest, refused: Refuse) -> None:
    sampling = request.sampling
    if request.pooling is not None:
        return
    if sampling.max_tokens == 0:
        if not request.echo:
            remedy = "" if isinstance(request.prompt, Conversation) else ", or set echo"
            raise refused("max_tokens", f"0 generates nothing; ask for at least 1{remedy}")
        # One is generated with the echo and dropped.
        sampling = msgspec.structs.replace(sampling, max_tokens=1)
    check(sampling, refused)
    check_stops(sampling.stop, refused)
    n = sampling.n or 1
    # gRPC has streams alone, and an answer in one piece is one.
    in_pieces = request.streaming and request.face != "grpc"
    if sampling.best_of is not None and sampling.best_of > n and in_pieces:
        raise refused("best_of", "the best answers are known at the end only; it cannot be streamed")
    if sampling.beam_width:
        check_beams_alone(sampling, refused)
    elif sampling.temperature == 0.0 and n > 1:
        raise refused("n", f"{n} greedy answers would be equal; use a temperature above 0, or n 1")


def check_vocabulary(request: GenerationRequest, tokens: Sequence[bytes]) -> None:
    """Raises INVALID_ARGUMENT for ids outside the vocabulary, wherever the request names some, and where all
    that it allows are ids without a token: these are never drawn.
    """
    refused, sampling, vocabulary_size = partial(refuse, request), request.sampling, len(tokens)
    prompts = _given_ids(request.prompt)
    check_token_ids(sampling, vocabulary_size, refused)
    for name, ids in prompts:
        check_ids(name, ids, vocabulary_size, refused)
    for name, ids in (
        ("logit_bias", sampling.logit_bias),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("stop_token_ids", sampling.stop_token_ids),
        *prompts,
    ):
        # Numbers of JSON have a sign.
        if ids and min(ids) < 0:
            raise refused(name, outside(min(ids), vocabulary_size))
    if (ids := sampling.allowed_token_ids) and not any(tokens[each] for each in ids):
        raise refused("allowed_token_ids", f"no id in it has a token ({ids[0]} has none); allow one that has")


def _given_ids(prompt: Prompt) -> list[tuple[str, Collection[int]]]:
    """Token ids among what is to be read, with the name of their field."""
    if isinstance(prompt, TokenPrompt):
        return [("prompt", prompt.token_ids)]
    if not isinstance(prompt, PromptList):
        return []
    every = enumerate(prompt.prompts)
    return [(f"texts[{index}]", each.token_ids) for index, each in every if isinstance(each, TokenPrompt)]


def _check_prompt(request: GenerationRequest, refused: Refuse) -> None:
    match request.prompt:
        case Conversation() as conversation:
            check_conversation(request, conversation)
        case PromptList(prompts=prompts):
            for index, each in enumerate(prompts):
                _check_given(each, f"texts[{index}]", refused)
        case TextPrompt() | TokenPrompt() as prompt:
            _check_given(prompt, "prompt", refused)


def _check_given(prompt: TextPrompt | TokenPrompt, field: str, refused: Refuse) -> None:
    match prompt:
        case TextPrompt(text=text) if not text:
            raise refused(field, "it is empty; give at least one character")
        case TokenPrompt(token_ids=ids) if not ids:
            raise refused(field, "it is empty; give at least one token id")
        case _:
            pass


def check_conversation(request: GenerationRequest, conversation: Conversation) -> None:
    """Raises INVALID_ARGUMENT for the first part of a conversation that is out of its limits."""
    messages, refused = conversation.messages, partial(refuse, request)
    if not messages:
        raise refused("messages", "it is empty; give at least one message")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]", refused)
    _check_tool_choice(request, conversation, refused)


def _check_message(message: Message, field: str, refused: Refuse) -> None:
    if message.role is Role.TOOL and not message.tool_call_id:
        raise refused(f"{field}.tool_call_id", "a tool message names the call it answers")
    if message.role is not Role.TOOL and message.tool_call_id:
        raise refused(f"{field}.tool_call_id", "only tool messages answer a call; leave it out")
    if message.role is not Role.ASSISTANT and message.tool_calls:
        raise refused(f"{field}.tool_calls", "only assistant messages call tools; leave them out")
    if message.role is not Role.ASSISTANT and message.reasoning:
        raise refused(f"{field}.reasoning", "only assistant messages reason; leave it out")
    for index, call in enumerate(message.tool_calls):
        if not call.name:
            raise refused(f"{field}.tool_calls[{index}].function.name", "it is empty; name the tool called")


def _check_tool_choice(request: GenerationRequest, conversation: Conversation, refused: Refuse) -> None:
    choice = conversation.tool_choice
    names = [tool.name for tool in conversation.tools]
    for index, name in enumerate(names):
        if not _ANY_NAME.fullmatch(name) or len(name) > request.max_tool_name:
            raise refused(f"tools[{index}].function.name", _no_name(name, request.max_tool_name))
        if name in names[:index]:
            raise refused(f"tools[{index}].function.name", f"{name!r} is there twice")
    if not choice.forces:
        return
    if not names:
        raise refused("tool_choice", f"{choice.mode} needs tools, and none are given")
    if choice.mode is ToolChoiceMode.NAMED and choice.name not in names:
        raise refused("tool_choice", f"{choice.name!r} is not one of the tools: {', '.join(names)}")
    if request.response_format is not None:
        problem = f"{choice.mode} and a response format exclude each other; give one of them"
        raise refused("tool_choice", problem)


def _check_format(request: GenerationRequest, refused: Refuse) -> None:
    format_ = request.response_format
    if request.sampling.ignore_eos and _constrained(request):
        problem = "it has no effect beside a constraint, which says where the answer ends"
        raise refused("ignore_eos", f"{problem}; leave one of them out")
    if isinstance(format_, JsonSchemaFormat) and format_.name and not NAME.fullmatch(format_.name):
        raise invalid(f"{request.field('response_format')}.name", _no_name(format_.name))
    if isinstance(format_, ChoiceFormat) and not all(format_.options):
        raise refused("response_format", "an option is empty")
    if isinstance(format_, ChoiceFormat) and not format_.options:
        raise refused("response_format", "no options are given")


def _no_name(text: str, most: int = 64) -> str:
    return f"{text[:80]!r} is not a name; use 1 to {most} of letters, digits, '_' and '-'"


def _constrained(request: GenerationRequest) -> bool:
    """Whether a grammar decides where the answer ends."""
    if request.response_format is not None:
        return True
    return isinstance(request.prompt, Conversation) and request.prompt.tool_choice.forces
