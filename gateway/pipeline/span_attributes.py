"""What the request's span says: who asked for what, and what became of it.

Names follow the GenAI conventions of the configured generation beside our own; see observability.emit.genai.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from opentelemetry.util.types import AttributeValue

from contract.chat import (
    CHAT_ID,
    COMPLETION_ID,
    ChoiceFormat,
    Conversation,
    EbnfFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    LarkFormat,
    RegexFormat,
)
from gateway.pipeline import transcript
from gateway.pipeline.attempt import Attempt, Outcome
from gateway.pipeline.delta import TimeToFirstToken, Usage
from gateway.types.request import GenerationRequest, Identity
from observability.emit import genai, names
from observability.emit.names import DELAYED_BY_MS, TTFT_PARTS, TtftPart
from observability.emit.tracing import Telemetry

Attributes = dict[str, AttributeValue]

GUIDED_KINDS: Mapping[type[msgspec.Struct], str] = {
    JsonObjectFormat: "json_object",
    JsonSchemaFormat: "json_schema",
    RegexFormat: "regex",
    ChoiceFormat: "choice",
    LarkFormat: "lark",
    EbnfFormat: "ebnf",
}


# The largest whole number that a span's attribute holds.
_LARGEST = 2**63 - 1


def _whole(value: int | None) -> int | str | None:
    """A number as a span takes it: in digits where it is too large for one."""
    return str(value) if value is not None and value > _LARGEST else value


def operation(request: GenerationRequest) -> str:
    """What the GenAI conventions call it."""
    if request.pooling is not None:
        return "embeddings"
    return "chat" if isinstance(request.prompt, Conversation) else "text_completion"


class Told(NamedTuple):
    """What a span is given when it ends, as `Telemetry.end` takes it."""

    attributes: Attributes
    details: Attributes


def asked(telemetry: Telemetry, identity: Identity, request: GenerationRequest) -> Told:
    """Of every request: a refused one can be found by them, too."""
    sampling = request.sampling
    attributes = genai.of_generation(
        {
            genai.OPERATION: operation(request),
            genai.REQUEST_MODEL: request.model,
            genai.SYSTEM: genai.PROVIDER,
            genai.PROVIDER_NAME: genai.PROVIDER,
            genai.STREAM: request.streaming,
            genai.MAX_TOKENS: sampling.max_tokens,
            genai.TEMPERATURE: sampling.temperature,
            genai.TOP_P: sampling.top_p,
            genai.TOP_K: sampling.top_k,
            genai.SEED: _whole(sampling.seed),
            genai.CHOICE_COUNT: None if sampling.n == 1 else sampling.n,
            genai.SERVICE_TIER_OLD: request.service_tier,
            genai.SERVICE_TIER: request.service_tier,
        },
        telemetry.semconv,
    )
    details: Attributes = {
        names.FACE: request.face,
        names.STREAMING: request.streaming,
        names.KEY_ID: identity.key_id,
    }
    if request.response_format is not None:
        details[names.GUIDED] = GUIDED_KINDS[type(request.response_format)]
    if telemetry.config.capture_content and (messages := transcript.asked(request.prompt)):
        attributes[genai.INPUT_MESSAGES] = messages
    return Told(attributes, details)


def answered(
    telemetry: Telemetry,
    attempt: Attempt,
    usage: Usage,
    outcome: Outcome,
    *,
    duration_s: float,
    tpot_s: float | None,
) -> Told:
    """Of a request that was accepted. Lengths are the conventions' attributes."""
    request, tier = attempt.call.request, attempt.call.tier
    statistics = attempt.meter.statistics
    # Every span has the tier; the convention's answers who asked for one.
    served_tier = tier.openai_name if request.service_tier else ""
    attributes = genai.of_generation(
        {
            genai.RESPONSE_MODEL: attempt.info.model,
            genai.RESPONSE_ID: _response_id(request, attempt.info.request_id),
            genai.FINISH_REASONS: None if outcome.is_failure else (outcome.name,),
            genai.INPUT_TOKENS: usage.prompt_tokens,
            genai.OUTPUT_TOKENS: usage.billed_tokens,
            genai.CACHED_TOKENS: usage.cached_prompt_tokens,
            genai.REASONING_TOKENS: usage.reasoning_tokens or None,
            genai.TIME_TO_FIRST_CHUNK: None if usage.ttft is None else usage.ttft.total_s,
            genai.RESPONSE_TIER_OLD: served_tier,
            genai.RESPONSE_TIER: served_tier,
        },
        telemetry.semconv,
    )
    attributes[names.TIER] = tier.name
    details: Attributes = {
        names.OUTCOME: outcome.name,
        names.CACHED_TOKENS: usage.cached_prompt_tokens,
        names.E2E_MS: duration_s * 1000,
        names.ENGINE_ID: attempt.engine,
        names.SPECULATIVE: statistics.drafted_tokens > 0,
    }
    optional = (
        (names.TPOT_MS, None if tpot_s is None else tpot_s * 1000),
        (names.ITL_MAX_MS, attempt.meter.longest_gap_s * 1000 or None),
        (names.TTFT_TARGET_MS, tier.config.ttft_target_ms),
        (names.TPOT_TARGET_MS, tier.config.tpot_target_ms),
        # Absent for the base model, and for tiers that are served by every engine.
        (names.ADAPTER, attempt.info.adapter or None),
        (names.POOL, attempt.pool or None),
        (names.FALLBACK_FROM, attempt.fallback_from or None),
        (names.REVISION, attempt.info.revision or None),
    )
    details |= {key: value for key, value in optional if value is not None}
    if usage.ttft is not None:
        attributes[names.TTFT_MS] = usage.ttft.total_s * 1000
        details |= {TTFT_PARTS[part]: seconds * 1000 for part, seconds in ttft_parts(usage.ttft).items()}
    causes = sorted(statistics.delayed_by_s, key=statistics.delayed_by_s.__getitem__, reverse=True)
    if causes:
        attributes[names.DELAYED_BY] = causes
        details |= _delays(statistics.delayed_by_s)
    if attempt.transcript is not None:
        attributes[genai.OUTPUT_MESSAGES] = attempt.transcript.answered()
    return Told(attributes, details)


def _response_id(request: GenerationRequest, request_id: str) -> str:
    """The id that the client reads in the answer."""
    if request.face != "http":
        return request_id
    of_prompt = CHAT_ID if isinstance(request.prompt, Conversation) else COMPLETION_ID
    return f"{request.id_prefix or of_prompt}{request_id}"


def ttft_parts(ttft: TimeToFirstToken) -> dict[TtftPart, float]:
    """Seconds by the part's name."""
    return {
        TtftPart.NETWORK: ttft.network_s,
        TtftPart.PREPROCESS: ttft.preprocess_s,
        TtftPart.QUEUE: ttft.queue_s,
        TtftPart.PREFILL: ttft.prefill_s,
        TtftPart.FIRST_DECODE: ttft.first_decode_s,
        TtftPart.DELIBERATION: ttft.deliberation_s,
        TtftPart.SERIALIZE: ttft.serialize_s,
    }


def _delays(delayed_by_s: Mapping[str, float]) -> Attributes:
    # An engine of a newer version may name causes that this gateway has no key for.
    return {key: delayed_by_s[cause] * 1000 for cause, key in DELAYED_BY_MS.items() if cause in delayed_by_s}
