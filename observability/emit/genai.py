"""OpenTelemetry's semantic conventions for generative AI, in the generation that the operator asks for.

The conventions are still in development. Version 1.36 is what instrumentations keep emitting unless
OTEL_SEMCONV_STABILITY_OPT_IN has gen_ai_latest_experimental; `semconv = "both"` emits both for a migration.
https://opentelemetry.io/docs/specs/semconv/gen-ai/
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.util.types import AttributeValue

from observability.emit.config import Semconv
from observability.emit.names import Attribute, attribute

PROVIDER = "millrace"

# Both generations of the conventions have these.
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
# The current generation has these.
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

_UNTIL_1_36 = frozenset({SYSTEM, SERVICE_TIER_OLD, RESPONSE_TIER_OLD})
_AFTER_1_36 = frozenset(
    {
        *(PROVIDER_NAME, STREAM, CACHED_TOKENS, REASONING_TOKENS, TIME_TO_FIRST_CHUNK),
        *(SERVICE_TIER, RESPONSE_TIER),
    }
)
_LACKS: Mapping[Semconv, frozenset[Attribute]] = {
    "v1.36": _AFTER_1_36,
    "latest": _UNTIL_1_36,
    "both": frozenset(),
}


def of_generation(
    found: Mapping[Attribute, AttributeValue | None], generation: Semconv
) -> dict[str, AttributeValue]:
    """Those of `found` that the generation has. None and "" are left out, and texts cut."""
    lacks = _LACKS[generation]
    return {
        key: value[:_LONGEST_WORD] if isinstance(value, str) else value
        for key, value in found.items()
        if value is not None and value != "" and key not in lacks
    }
