"""Whether a request may think longer, and what it may take: what was asked for, within its tier's bounds."""

from __future__ import annotations

from msgspec.structs import replace

from contract.errors import MillraceError, unsupported
from contract.sampling import SamplingParams
from gateway.config import STRATEGIES, DeliberationConfig
from gateway.pipeline.validate import refuse, shortened
from gateway.test_time import ballots
from gateway.test_time.confidence import TOP
from gateway.tiers import Tier
from gateway.types.deliberation import (
    BALLOTS,
    MAX_PATTERN,
    ON_FAILURE,
    RANKINGS,
    Deliberation,
    ScorerSpec,
)
from gateway.types.request import GenerationRequest

MAX_SAMPLES = 128
DEFAULT_CONFIDENCE = 0.95
_LEAST_CONFIDENCE, _MOST_CONFIDENCE = 0.5, 0.999
_DEFAULT_SAMPLES = 8
_FIELD = "test_time"
# What scorers of a type must have, and no others.
_PARTS = {"pattern": "regex", "schema_json": "schema", "model": "model"}


def checked(request: GenerationRequest, ask: Deliberation) -> None:
    """Raises INVALID_ARGUMENT for what no tier makes right."""
    if ask.strategy not in STRATEGIES:
        raise refuse(request, f"{_FIELD}.strategy", _none_of(ask.strategy, STRATEGIES))
    if ask.on_failure not in ON_FAILURE:
        raise refuse(request, f"{_FIELD}.on_failure", _none_of(ask.on_failure, ON_FAILURE))
    if ask.samples is not None and not 2 <= ask.samples <= MAX_SAMPLES:
        problem = f"{ask.samples} is not between 2 and {MAX_SAMPLES}"
        raise refuse(request, f"{_FIELD}.samples", problem)
    if ask.budget_tokens is not None and ask.budget_tokens < 1:
        raise refuse(request, f"{_FIELD}.budget_tokens", f"{ask.budget_tokens} tokens; give at least 1")
    if ask.confidence is not None:
        _check_confidence(request, ask.strategy, ask.confidence)
    if ask.scorer is not None:
        _check_scorer(request, ask.strategy, ask.scorer)
    _check_others(request)


def _check_confidence(request: GenerationRequest, strategy: str, confidence: float) -> None:
    field = f"{_FIELD}.confidence"
    if strategy == "best_of":
        raise refuse(request, field, "it is for votes, and best_of has none; leave it out")
    if not _LEAST_CONFIDENCE <= confidence <= _MOST_CONFIDENCE:
        problem = f"{confidence:g} is not between {_LEAST_CONFIDENCE} and {_MOST_CONFIDENCE}"
        raise refuse(request, field, problem)


def _check_scorer(request: GenerationRequest, strategy: str, scorer: ScorerSpec) -> None:
    field = f"{_FIELD}.scorer"
    types = RANKINGS if strategy == "best_of" else BALLOTS
    if scorer.type not in types:
        problem = f"{_none_of(scorer.type, types)}, which {strategy} has"
        raise refuse(request, f"{field}.type", problem)
    for name, type_ in _PARTS.items():
        part, told = getattr(scorer, name), name.removesuffix("_json")
        if scorer.type == type_ and not part:
            raise refuse(request, f"{field}.{told}", f"it is required with type {type_!r}")
        if scorer.type != type_ and part:
            raise refuse(request, f"{field}.{told}", f"type {scorer.type!r} has none; leave it out")
    for name in ("minimum", "maximum"):
        if getattr(scorer, name) is not None and (scorer.type != "number" or strategy != "best_of"):
            problem = "it is for numbers that best_of chooses by; leave it out"
            raise refuse(request, f"{field}.{name}", problem)
    if len(scorer.pattern) > MAX_PATTERN:
        problem = f"{len(scorer.pattern)} characters; the limit is {MAX_PATTERN}"
        raise refuse(request, f"{field}.pattern", problem)
    if scorer.schema_json and not scorer.schema_json.startswith("{"):
        raise refuse(request, f"{field}.schema", "a JSON Schema is an object")
    ballots.compiled(scorer, request.field(field))


def _check_others(request: GenerationRequest) -> None:
    """Raises for options of the request that say something else of how many answers there are."""
    sampling = request.sampling
    for name in ("n", "best_of", "beam_width"):
        if (getattr(sampling, name) or 1) > 1:
            problem = "test_time says how many answers are computed, and gives one; leave one of them out"
            raise refuse(request, name, problem)
    if sampling.temperature == 0.0:
        raise refuse(request, "temperature", "greedy samples would be equal; use a temperature above 0")


def within_tier(request: GenerationRequest, ask: Deliberation, tier: Tier) -> Deliberation:
    """What the tier lets it have, all set but the budget; raises UNSUPPORTED_FIELD for a strategy that the
    tier forbids, and INVALID_ARGUMENT for more than it allows.
    """
    config = tier.config.test_time
    if config is None or not config.strategies:
        problem = f"tier {tier.openai_name!r} has no test_time"
        raise unsupported(request.field(_FIELD), "leave it out, or ask for another service_tier", problem)
    if ask.strategy not in config.strategies:
        problem = f"{ask.strategy!r} is not among those of tier {tier.openai_name!r}"
        remedy = f"use {' or '.join(config.strategies)}"
        raise unsupported(request.field(f"{_FIELD}.strategy"), remedy, problem)
    for name, limit in (("samples", config.max_samples), ("budget_tokens", config.max_budget_tokens)):
        asked = getattr(ask, name)
        if asked is not None and limit is not None and asked > limit:
            told = f"{asked}; the limit is {limit} (tiers.{tier.name}.test_time.max_{name}): ask for fewer"
            raise refuse(request, f"{_FIELD}.{name}", told)
    return _completed(ask, config)


def _completed(ask: Deliberation, config: DeliberationConfig) -> Deliberation:
    samples = min(_DEFAULT_SAMPLES, config.max_samples) if ask.samples is None else ask.samples
    is_vote = ask.strategy != "best_of"
    return Deliberation(
        strategy=ask.strategy,
        samples=samples,
        budget_tokens=config.max_budget_tokens if ask.budget_tokens is None else ask.budget_tokens,
        confidence=(DEFAULT_CONFIDENCE if ask.confidence is None else ask.confidence) if is_vote else None,
        scorer=ask.scorer or ScorerSpec(type="auto" if is_vote else "likelihood"),
        on_failure=ask.on_failure,
    )


def of_a_sample(request: GenerationRequest, ask: Deliberation, sampling: SamplingParams) -> SamplingParams:
    """The options of each sample. Raises INVALID_ARGUMENT for a budget that is less than one sample, and for
    samples that would be equal.
    """
    if sampling.greedy:
        problem = "the model's own is 0, and greedy samples would be equal; give one above 0"
        raise refuse(request, "temperature", problem)
    budget, max_tokens = ask.budget_tokens, sampling.max_tokens
    if budget is not None:
        least = max_tokens if request.sampling.max_tokens is not None else ask.num_samples
        if budget < least:
            asked = f"max_tokens {max_tokens}" if least == max_tokens else f"{least} samples"
            problem = f"{budget} tokens are less than one sample may take ({asked}); ask for a larger budget"
            raise refuse(request, f"{_FIELD}.budget_tokens", problem)
        if request.sampling.max_tokens is None:
            max_tokens = min(max_tokens, budget // ask.num_samples)
    needed = TOP if ask.strategy == "deepconf" else 0
    return replace(
        shortened(sampling, max_tokens),
        # A likelihood takes the token's own.
        logprobs=max(sampling.logprobs or 0, needed),
    )


def most_tokens(ask: Deliberation, sampling: SamplingParams) -> int:
    """Generated tokens that all samples may take together."""
    most = sampling.max_tokens * ask.num_samples
    return most if ask.budget_tokens is None else min(most, ask.budget_tokens)


def _none_of(value: str, known: tuple[str, ...]) -> str:
    return f"{value[:80]!r} is not one of {', '.join(known)}"


def failed(ask: Deliberation, error: MillraceError) -> Deliberation:
    """The plain answer instead; raises the error where that is not wanted."""
    if ask.on_failure != "answer":
        raise error
    return Deliberation(strategy=ask.strategy, on_failure=ask.on_failure, failure=error.message)
