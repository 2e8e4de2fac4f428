"""Whether a request may think longer, and what it may take: what was asked for, within its tier's bounds."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from contract.chat import Conversation
from contract.errors import MillraceError, unsupported
from contract.sampling import SamplingParams
from gateway.config import STRATEGIES, DeliberationConfig
from gateway.pipeline.validate import refuse, shortened
from gateway.test_time import ballots
from gateway.tiers import Tier
from gateway.types.deliberation import (
    BALLOTS,
    MAX_DELIMITER,
    MAX_PATTERN,
    ON_FAILURE,
    RANKINGS,
    Deliberation,
    ScorerSpec,
)
from gateway.types.request import GenerationRequest

MAX_SAMPLES = 128
DEFAULT_CONFIDENCE = 0.95
# Of voters; the least with which a first model may be believed is lower.
_LEAST_CONFIDENCE, _MOST_CONFIDENCE = 0.5, 0.999
LEAST_BELIEF = 0.01
# From which a first model is believed.
DEFAULT_BELIEF = 0.8
DEFAULT_DELIMITER = "\n"
# Where a request does not say how many.
_DEFAULT_SAMPLES = {"escalate": 2, "critique_revise": 3}
_MANY_SAMPLES = 8
# What scorers of a strategy may be.
_SCORERS: Mapping[str, tuple[str, ...]] = {
    "best_of": RANKINGS,
    "escalate": RANKINGS,
    "critique_revise": ("regex",),
    # What can judge half an answer.
    "search": ("likelihood", "model", "verifier"),
}
_FIELD = "test_time"
# What scorers of a type must have, and no others.
# But for votes, which a model may weigh.
_PARTS = {"pattern": ("regex",), "schema_json": ("schema",), "model": ("model", "verifier")}


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
        if ask.strategy == "self_consistency" and ask.scorer.model and ask.confidence is not None:
            problem = "a model weighs all samples, when all have ended; leave confidence or scorer.model out"
            raise refuse(request, f"{_FIELD}.confidence", problem)
    _check_model(request, ask)
    if ask.delimiter:
        _check_delimiter(request, ask)
    if ask.is_chain:
        _check_chain(request)
    _check_others(request, may_be_greedy=ask.is_chain)


def _check_model(request: GenerationRequest, ask: Deliberation) -> None:
    field = f"{_FIELD}.model"
    if ask.strategy != "escalate":
        if ask.model:
            raise refuse(request, field, f"it is for escalate, and {ask.strategy} asks the request's model")
        return
    if not ask.model:
        raise refuse(request, field, "it is required: the model that answers where the first one is doubted")
    if ask.model == request.model:
        raise refuse(request, field, "it is the model that is asked first; name another one")
    if ask.samples not in (None, 2):
        raise refuse(request, f"{_FIELD}.samples", "escalate has one answer of each model; leave it out")


def _check_delimiter(request: GenerationRequest, ask: Deliberation) -> None:
    field = f"{_FIELD}.delimiter"
    if ask.strategy != "search":
        raise refuse(request, field, f"it ends steps of search, and {ask.strategy} has none; leave it out")
    if len(ask.delimiter) > MAX_DELIMITER:
        raise refuse(request, field, f"{len(ask.delimiter)} characters; the limit is {MAX_DELIMITER}")


def _check_chain(request: GenerationRequest) -> None:
    """Raises for what an answer cannot be asked again with."""
    prompt = request.prompt
    if not isinstance(prompt, Conversation):
        raise refuse(request, "prompt", "these strategies of test_time need messages; leave one of both out")
    if prompt.continue_final_message:
        problem = "a message that goes on cannot be answered twice; leave it or test_time out"
        raise refuse(request, "continue_final_message", problem)
    if request.echo:
        raise refuse(request, "echo", "test_time returns the answer alone; leave one of them out")


def _check_confidence(request: GenerationRequest, strategy: str, confidence: float) -> None:
    field = f"{_FIELD}.confidence"
    if strategy in ("best_of", "critique_revise", "search"):
        raise refuse(request, field, f"it is for votes and doubts, and {strategy} has none; leave it out")
    least = LEAST_BELIEF if strategy == "escalate" else _LEAST_CONFIDENCE
    if not least <= confidence <= _MOST_CONFIDENCE:
        problem = f"{confidence:g} is not between {least} and {_MOST_CONFIDENCE}"
        raise refuse(request, field, problem)


def _check_scorer(request: GenerationRequest, strategy: str, scorer: ScorerSpec) -> None:
    field = f"{_FIELD}.scorer"
    types = _SCORERS.get(strategy, BALLOTS)
    if scorer.type not in types:
        problem = f"{_none_of(scorer.type, types)}, which {strategy} has"
        raise refuse(request, f"{field}.type", problem)
    for name, with_it in _PARTS.items():
        part, told = getattr(scorer, name), name.removesuffix("_json")
        if scorer.type in with_it and not part:
            raise refuse(request, f"{field}.{told}", f"it is required with type {scorer.type!r}")
        weighs = name == "model" and strategy == "self_consistency"
        if scorer.type not in with_it and part and not weighs:
            raise refuse(request, f"{field}.{told}", f"type {scorer.type!r} has none; leave it out")
    _check_bounds(request, scorer, has_bounds=types is not BALLOTS and scorer.type in ("number", "verifier"))
    if len(scorer.pattern) > MAX_PATTERN:
        problem = f"{len(scorer.pattern)} characters; the limit is {MAX_PATTERN}"
        raise refuse(request, f"{field}.pattern", problem)
    if scorer.schema_json and not scorer.schema_json.startswith("{"):
        raise refuse(request, f"{field}.schema", "a JSON Schema is an object")
    ballots.compiled(scorer, request.field(field))


def _check_bounds(request: GenerationRequest, scorer: ScorerSpec, *, has_bounds: bool) -> None:
    field, least, most = f"{_FIELD}.scorer", scorer.minimum, scorer.maximum
    for name, value in (("minimum", least), ("maximum", most)):
        if value is not None and not has_bounds:
            problem = "it is for numbers that answers are chosen by; leave it out"
            raise refuse(request, f"{field}.{name}", problem)
    are_grades = scorer.type == "verifier"
    if are_grades and (least is None) != (most is None):
        missing = "minimum" if least is None else "maximum"
        raise refuse(request, f"{field}.{missing}", "grades have two bounds; give both, or none for a yes")
    if least is None or most is None:
        return
    if are_grades and least >= most:
        raise refuse(request, f"{field}.maximum", f"{most:g} is not above the minimum, {least:g}")
    if least > most:
        problem = f"{most:g} is below the minimum, {least:g}, so that no answer passes; exchange them"
        raise refuse(request, f"{field}.maximum", problem)


def _check_others(request: GenerationRequest, *, may_be_greedy: bool) -> None:
    """Raises for options of the request that say something else of how many answers there are."""
    sampling = request.sampling
    for name in ("n", "best_of", "beam_width"):
        if (getattr(sampling, name) or 1) > 1:
            problem = "test_time says how many answers are computed, and gives one; leave one of them out"
            raise refuse(request, name, problem)
    if sampling.temperature == 0.0 and not may_be_greedy:
        raise refuse(request, "temperature", "greedy samples would be equal; use a temperature above 0")


def within_tier(request: GenerationRequest, ask: Deliberation, tier: Tier) -> Deliberation:
    """What the tier lets it have, all set but the budget; raises UNSUPPORTED_FIELD for a strategy that the
    tier forbids, and INVALID_ARGUMENT for more than it allows.
    """
    config = tier.config.test_time
    if config is None or not config.strategies:
        problem = f"tier {tier.both_names} has no test_time"
        raise unsupported(request.field(_FIELD), "leave it out, or ask for another service_tier", problem)
    if ask.strategy not in config.strategies:
        problem = f"{ask.strategy!r} is not among those of tier {tier.both_names}"
        remedy = f"use {' or '.join(config.strategies)}"
        raise unsupported(request.field(f"{_FIELD}.strategy"), remedy, problem)
    for name, limit in (("samples", config.max_samples), ("budget_tokens", config.max_budget_tokens)):
        asked = getattr(ask, name)
        if asked is not None and limit is not None and asked > limit:
            told = f"{asked}; the limit is {limit} (tiers.{tier.name}.test_time.max_{name}): ask for fewer"
            raise refuse(request, f"{_FIELD}.{name}", told)
    return _completed(ask, config)


def _completed(ask: Deliberation, config: DeliberationConfig) -> Deliberation:
    strategy = ask.strategy
    samples = ask.samples
    if samples is None:
        samples = min(_DEFAULT_SAMPLES.get(strategy, _MANY_SAMPLES), config.max_samples)
    confidence, scorer = ask.confidence, ask.scorer
    if strategy == "escalate":
        confidence = DEFAULT_BELIEF if confidence is None else confidence
    elif strategy not in _SCORERS:
        confidence = DEFAULT_CONFIDENCE if confidence is None else confidence
    if scorer is None and strategy != "critique_revise":
        scorer = ScorerSpec(type="likelihood" if strategy in _SCORERS else "auto")
    return replace(
        ask,
        samples=samples,
        budget_tokens=config.max_budget_tokens if ask.budget_tokens is None else ask.budget_tokens,
        confidence=confidence,
        scorer=scorer,
        delimiter=ask.delimiter or (DEFAULT_DELIMITER if strategy == "search" else ""),
    )


def of_a_sample(request: GenerationRequest, ask: Deliberation, sampling: SamplingParams) -> SamplingParams:
    """The options of each sample. Raises INVALID_ARGUMENT for a budget that is less than one sample, and for
    samples that would be equal.
    """
    if sampling.greedy and not ask.is_chain:
        problem = "the model's own is 0, and greedy samples would be equal; give one above 0"
        raise refuse(request, "temperature", problem)
    budget, max_tokens = ask.budget_tokens, sampling.max_tokens
    if budget is not None:
        least = max_tokens if request.sampling.max_tokens is not None else ask.num_parts
        if budget < least:
            asked = f"max_tokens {max_tokens}" if least == max_tokens else f"{least} samples"
            problem = f"{budget} tokens are less than one sample may take ({asked}); ask for a larger budget"
            raise refuse(request, f"{_FIELD}.budget_tokens", problem)
        if request.sampling.max_tokens is None:
            max_tokens = min(max_tokens, budget // ask.num_parts)
    # A likelihood takes the token's own.
    return replace(shortened(sampling, max_tokens), logprobs=sampling.logprobs or 0)


def most_tokens(ask: Deliberation, sampling: SamplingParams) -> int:
    """Generated tokens that all parts may take together."""
    most = sampling.max_tokens * ask.num_parts
    return most if ask.budget_tokens is None else min(most, ask.budget_tokens)


def own_tokens(ask: Deliberation, sampling: SamplingParams) -> int:
    """Those of them that the request itself takes: what other requests take, these reserve."""
    return sampling.max_tokens if ask.is_chain else most_tokens(ask, sampling)


def _none_of(value: str, known: tuple[str, ...]) -> str:
    return f"{value[:80]!r} is not one of {', '.join(known)}"


def failed(ask: Deliberation, error: MillraceError) -> Deliberation:
    """The plain answer instead; raises the error where that is not wanted."""
    if ask.on_failure != "answer":
        raise error
    return Deliberation(strategy=ask.strategy, on_failure=ask.on_failure, failure=error.message)
