"""OpenTelemetry's semantic conventions for generative AI, in the generation that the operator asks for.

The conventions are still in development. Version 1.36 is what instrumentations keep emitting unless
OTEL_SEMCONV_STABILITY_OPT_IN has gen_ai_latest_experimental; `semconv = "both"` emits both for a migration.
https://opentelemetry.io/docs/specs/semconv/gen-ai/
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from opentelemetry.util.types import AttributeValue

from observability.emit.config import Semconv
from observability.emit.names import attribute

PROVIDER = "millrace"

# In both generations.
OPERATION = attribute("gen_ai.operation.name", "", "chat or text_completion.")
REQUEST_MODEL = attribute("gen_ai.request.model", "", "Model that the client asked for.")
RESPONSE_MODEL = attribute("gen_ai.response.model", "", "Model that answered.")
RESPONSE_ID = attribute("gen_ai.response.id", "", "Id of the completion.")
MAX_TOKENS = attribute("gen_ai.request.max_tokens", "{token}", "Limit that the client set.")
TEMPERATURE = attribute("gen_ai.request.temperature", "1", "Sampling temperature.")
TOP_P = attribute("gen_ai.request.top_p", "1", "Nucleus sampling.")
TOP_K = attribute("gen_ai.request.top_k", "{token}", "Top-k sampling.")
SEED = attribute("gen_ai.request.seed", "", "Random seed.")
CHOICE_COUNT = attribute("gen_ai.request.choice.count", "{choice}", "Choices asked for, when not one.")
FINISH_REASONS = attribute("gen_ai.response.finish_reasons", "", "One per choice.")
INPUT_TOKENS = attribute("gen_ai.usage.input_tokens", "{token}", "Prompt tokens.")
OUTPUT_TOKENS = attribute("gen_ai.usage.output_tokens", "{token}", "Completion tokens.")
# Up to 1.36.
SYSTEM = attribute("gen_ai.system", "", "This product; up to version 1.36.")
SERVICE_TIER_OLD = attribute("gen_ai.openai.request.service_tier", "", "Tier asked for; up to 1.36.")
RESPONSE_TIER_OLD = attribute("gen_ai.openai.response.service_tier", "", "Tier served; up to 1.36.")
# Current.
PROVIDER_NAME = attribute("gen_ai.provider.name", "", "This product; after version 1.36.")
STREAM = attribute("gen_ai.request.stream", "", "Whether the answer is streamed; after 1.36.")
CACHED_TOKENS = attribute("gen_ai.usage.cache_read.input_tokens", "{token}", "Cached prompt tokens.")
REASONING_TOKENS = attribute("gen_ai.usage.reasoning.output_tokens", "{token}", "Reasoning tokens.")
TIME_TO_FIRST_CHUNK = attribute("gen_ai.response.time_to_first_chunk", "s", "Time to the first chunk.")
SERVICE_TIER = attribute("openai.request.service_tier", "", "Tier asked for; after 1.36.")
RESPONSE_TIER = attribute("openai.response.service_tier", "", "Tier served; after 1.36.")
# Content; only with `capture_content`.
INPUT_MESSAGES = attribute("gen_ai.input.messages", "", "The conversation, as JSON.")
OUTPUT_MESSAGES = attribute("gen_ai.output.messages", "", "The completions, as JSON.")

# A refused request's model may be any text that its client sent.
_LONGEST_WORD = 256


class GenAiRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is known when the request arrives. None and "" are left out."""

    operation: str
    model: str
    stream: bool = False
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    choices: int = 1
    service_tier: str = ""


class GenAiResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What is known when it has been answered."""

    model: str
    response_id: str = ""
    finish_reasons: Sequence[str] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_prompt_tokens: int = 0
    reasoning_tokens: int = 0
    time_to_first_chunk_s: float | None = None
    service_tier: str = ""


def request_attributes(request: GenAiRequest, generation: Semconv) -> dict[str, AttributeValue]:
    """Span attributes of a request."""
    found: dict[str, AttributeValue | None] = {
        OPERATION: request.operation,
        REQUEST_MODEL: request.model,
        MAX_TOKENS: request.max_tokens,
        TEMPERATURE: request.temperature,
        TOP_P: request.top_p,
        TOP_K: request.top_k,
        SEED: request.seed,
        CHOICE_COUNT: None if request.choices == 1 else request.choices,
    }
    if generation != "latest":
        found |= {SYSTEM: PROVIDER, SERVICE_TIER_OLD: request.service_tier}
    if generation != "v1.36":
        found |= {PROVIDER_NAME: PROVIDER, STREAM: request.stream, SERVICE_TIER: request.service_tier}
    return _present(found)


def response_attributes(response: GenAiResponse, generation: Semconv) -> dict[str, AttributeValue]:
    """Span attributes of a response."""
    found: dict[str, AttributeValue | None] = {
        RESPONSE_MODEL: response.model,
        RESPONSE_ID: response.response_id,
        FINISH_REASONS: tuple(response.finish_reasons) or None,
        INPUT_TOKENS: response.prompt_tokens,
        OUTPUT_TOKENS: response.completion_tokens,
    }
    if generation != "latest":
        found |= {RESPONSE_TIER_OLD: response.service_tier}
    if generation != "v1.36":
        found |= {
            CACHED_TOKENS: response.cached_prompt_tokens,
            REASONING_TOKENS: response.reasoning_tokens or None,
            TIME_TO_FIRST_CHUNK: response.time_to_first_chunk_s,
            RESPONSE_TIER: response.service_tier,
        }
    return _present(found)


def _present(found: dict[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    return {
        key: value[:_LONGEST_WORD] if isinstance(value, str) else value
        for key, value in found.items()
        if value is not None and value != ""
    }
