"""How tokens are chosen: every option once, with its limits and the value that asks for nothing.

The declaration of an option is its field in SamplingParams. Faces, converters, defaults, the OpenAPI document
and both checks (at the gateway before anything is paid for, and in the engine) are derived from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_type_hints

import msgspec

_INT32 = 2**31 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_LOGIT_BIAS = 1024

# Scope of an option: how one token is drawn, one choice, or the request as a whole.
Per: TypeAlias = Literal["token", "choice", "request"]


class Limits(msgspec.Struct, frozen=True):
    """The values of an option: of a number itself, or of the numbers in a mapping. Both ends are allowed."""

    per: Per
    minimum: float = -math.inf
    maximum: float = math.inf

    def contains(self, value: float) -> bool:
        """Whether `value` is allowed; NaN is not."""
        return self.minimum <= value <= self.maximum


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of one request, all set: by client, checkpoint or API. What nobody sets is neutral here."""

    # 0 is greedy decoding.
    temperature: Annotated[float, Limits("token", 0, 2)] = 1.0
    # 0 keeps all tokens.
    top_k: Annotated[int, Limits("token", 0, _INT32)] = 0
    top_p: Annotated[float, Limits("token", 0, 1)] = 1.0
    min_p: Annotated[float, Limits("token", 0, 1)] = 0.0
    presence_penalty: Annotated[float, Limits("token", -2, 2)] = 0.0
    frequency_penalty: Annotated[float, Limits("token", -2, 2)] = 0.0
    # 1 is off; applies to tokens of prompt and output.
    repetition_penalty: Annotated[float, Limits("token", 0.01, 10)] = 1.0
    # Token id to additive bias.
    logit_bias: Annotated[dict[int, float], Limits("token", -100, 100)] = {}
    # Empty allows every token.
    allowed_token_ids: Annotated[tuple[int, ...], Limits("choice")] = ()
    # The random stream of output position i is a pure function of (seed, choice index, i). OpenAI's seeds are
    # of 64 bits with a sign: engines get a negative one as the number of 64 bits without sign that has the
    # same bits, which is 2**64 more.
    seed: Annotated[int, Limits("request", -(2**63), 2**64 - 1)] = 0
    max_tokens: Annotated[int, Limits("choice", 1, _INT32)] = 16
    # Stop tokens are masked before this many output tokens.
    min_tokens: Annotated[int, Limits("choice", 0, _INT32)] = 0
    # Tokens that may be thought, the closing tag's included; at the limit the model's own end of thinking is
    # forced. None has no limit.
    max_thinking_tokens: Annotated[int | None, Limits("choice", 0, _INT32)] = None
    # Tokens that end the choice, the model's own end-of-sequence tokens included unless ignored.
    stop_token_ids: Annotated[tuple[int, ...], Limits("choice")] = ()
    ignore_eos: Annotated[bool, Limits("choice")] = False
    n: Annotated[int, Limits("request", 1, 128)] = 1
    best_of: Annotated[int, Limits("request", 1, 128)] = 1
    # Number of alternatives reported per token; None reports nothing, 0 the sampled token alone.
    logprobs: Annotated[int | None, Limits("choice", 0, 20)] = None
    prompt_logprobs: Annotated[int | None, Limits("request", 0, 20)] = None
    # 0 samples; otherwise the number of beams.
    beam_width: Annotated[int, Limits("request", 0, 16)] = 0

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def ranks_at_the_end(self) -> bool:
        """Whether the answers are chosen among more, which takes all of them to be complete."""
        return self.best_of > self.n or self.beam_width > 0


def special_needs(options: SamplingParams) -> set[str]:
    """Options in use that engines of another make may lack (EngineInfo.unsupported)."""
    asked = {"beam_width": options.beam_width > 0, "best_of": options.best_of > options.n}
    return {name for name, is_used in asked.items() if is_used}


class CommonOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers and switches that every face calls by the same name. None: the client did not say."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    best_of: int | None = None
    beam_width: int | None = None


class SamplingOptions(CommonOptions, frozen=True, kw_only=True):
    """How tokens are chosen, as far as the client said so."""

    logit_bias: Mapping[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    # Texts that end the answer; the gateway looks for them, engines see tokens alone.
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_thinking_tokens: int | None = None

    @property
    def branches(self) -> tuple[str, int]:
        """The option that says how many sequences are computed for a prompt, and how many those are."""
        n, best_of, beam_width = self.n or 1, self.best_of or 1, self.beam_width or 1
        if beam_width > max(n, best_of):
            return "beam_width", beam_width
        return ("best_of", best_of) if best_of > n else ("n", n)

    def given(self) -> dict[str, Any]:
        """Numbers and switches that were set, by name."""
        pairs = zip(SCALARS, scalars_of(self), strict=True)
        return {name: value for name, value in pairs if value is not None}


class Option(msgspec.Struct, frozen=True):
    """An option's declaration: its type, its limits, and the value that asks for nothing."""

    name: str
    kind: type
    limits: Limits
    neutral: Any


def _declared() -> dict[str, Option]:
    hints = get_type_hints(SamplingParams, include_extras=True)
    found = {}
    for name, neutral in zip(
        SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True
    ):
        annotated, limits = get_args(hints[name])
        # The kind of `int | None` is int, that of `tuple[int, ...]` tuple.
        kind = next((each for each in get_args(annotated) if each in (int, float)), annotated)
        if hasattr(annotated, "__origin__"):
            kind = annotated.__origin__
        found[name] = Option(name, kind, limits, {} if kind is dict else neutral)
    return found


OPTIONS: Mapping[str, Option] = _declared()
# Numbers and switches; the others are lists of tokens.
SCALARS: tuple[str, ...] = tuple(name for name, each in OPTIONS.items() if each.kind in (float, int, bool))
# Numbers, with their limits.
RANGES: Mapping[str, Limits] = {
    name: OPTIONS[name].limits for name in SCALARS if OPTIONS[name].kind is not bool
}
# How one token is drawn, which a beam search does not do: it takes the most likely ones. For the values that
# ask for nothing there, temperature 0 is what it does anyway.
_DRAWING = {name: each.neutral for name, each in OPTIONS.items() if each.limits.per == "token"} | {
    "temperature": 0
}

scalars_of = attrgetter(*SCALARS)
_numbers_of = attrgetter(*RANGES)
_drawing_of = attrgetter(*_DRAWING)

# Makes the error for a field and what is wrong with it.
Refuse: TypeAlias = Callable[[str, str], Exception]


def check(options: SamplingOptions | SamplingParams, refuse: Refuse) -> None:
    """Raises `refuse(name, problem)` for the first option beyond its limits or against another one."""
    for value, (name, limits) in zip(_numbers_of(options), RANGES.items(), strict=True):
        # Written out: both services do this for every request.
        if value is not None and not limits.minimum <= value <= limits.maximum:
            raise refuse(name, f"{value} is not between {limits.minimum} and {limits.maximum}")
    if options.top_p == 0.0:
        raise refuse("top_p", "0 would keep no token; use temperature 0 for greedy decoding")
    if len(options.logit_bias) > MAX_LOGIT_BIAS:
        raise refuse("logit_bias", f"{len(options.logit_bias)} entries; the limit is {MAX_LOGIT_BIAS}")
    bounds = OPTIONS["logit_bias"].limits
    for token_id, bias in options.logit_bias.items():
        if not bounds.contains(bias):
            raise refuse(
                "logit_bias",
                f"{bias:g} for token {token_id} is not between {bounds.minimum} and {bounds.maximum}",
            )
    if options.min_tokens and options.max_tokens is not None and options.min_tokens > options.max_tokens:
        raise refuse("min_tokens", f"{options.min_tokens} is more than max_tokens {options.max_tokens}")
    n = options.n or 1
    if options.best_of is not None and options.best_of < n:
        raise refuse("best_of", f"{options.best_of} is less than n {n}")
    if options.beam_width:
        _check_beams(options, n, refuse)


def _check_beams(options: SamplingOptions | SamplingParams, n: int, refuse: Refuse) -> None:
    if n > (options.beam_width or 0):
        raise refuse("beam_width", f"{options.beam_width} beams cannot give n {n} answers")
    if options.best_of not in (None, n):
        raise refuse("best_of", "it has no effect on a search with beam_width; leave one of them out")


def check_beams_alone(options: SamplingOptions, refuse: Refuse) -> None:
    """Raises for what has no effect on beams: they are ranked by the model's own log-probabilities."""
    for (name, neutral), value in zip(_DRAWING.items(), _drawing_of(options), strict=True):
        if value is not None and value != neutral:
            raise refuse(name, "it has no effect on a search with beam_width; leave one of them out")


def check_stops(stop: Collection[str], refuse: Refuse) -> None:
    """Raises for stop strings that are too many, empty or too long."""
    if len(stop) > MAX_STOP_STRINGS:
        raise refuse("stop", f"{len(stop)} strings; the limit is {MAX_STOP_STRINGS}")
    for text in stop:
        if not text:
            raise refuse("stop", "an empty string would stop at once; leave it out")
        if len(text) > MAX_STOP_CHARACTERS:
            raise refuse("stop", f"a string of {len(text)} characters; the limit is {MAX_STOP_CHARACTERS}")


def check_token_ids(options: SamplingOptions | SamplingParams, vocabulary_size: int, refuse: Refuse) -> None:
    """Raises for an option that names a token which the vocabulary does not have."""
    check_ids("logit_bias", options.logit_bias, vocabulary_size, refuse)
    check_ids("allowed_token_ids", options.allowed_token_ids, vocabulary_size, refuse)
    check_ids("stop_token_ids", options.stop_token_ids, vocabulary_size, refuse)


def check_ids(name: str, token_ids: Collection[int], vocabulary_size: int, refuse: Refuse) -> None:
    """Raises for a token id beyond the vocabulary."""
    if token_ids and max(token_ids) >= vocabulary_size:
        raise refuse(name, outside(max(token_ids), vocabulary_size))


def outside(token_id: int, vocabulary_size: int) -> str:
    """What is wrong with a token id that the vocabulary does not have."""
    return f"token id {token_id} is outside the vocabulary of {vocabulary_size} tokens"
