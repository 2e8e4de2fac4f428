"""Where the time of an answer went, as every face over HTTP tells it where `include_timing` asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.pipeline.delta import Usage

# What is to be known of the field, by faces whose usage has a fixed form.
ACCEPTED: Mapping[str, str] = {
    "include_timing": "`timing` has the numbers of `usage.timings` of `/v1/chat/completions`"
}


class SharedRequest(Struct, frozen=True):
    """Another request of the same tenant's: how long the engine worked on it while this one was held back by
    the cause.
    """

    request_id: str
    cause: str
    overlap_ms: float


class Timings(Struct, frozen=True):
    """What became of the time, in the words of the traces. `deliberation_ms` is what samples of `test_time`
    took, after the first one's first token, until one was chosen. Tokens a second are those after the first,
    of all choices together, or of the chosen sample as it was generated; of drafted tokens some were
    accepted. `delayed_by_ms` has the causes that held it back, `delayed_by_requests` the tenant's own
    requests that had most to do with that.
    """

    queue_ms: float
    prepare_ms: float
    prefill_ms: float
    deliberation_ms: float
    first_token_ms: float
    tokens_per_second: float | None
    cached_tokens: Annotated[int, Meta(ge=0)]
    drafted_tokens: Annotated[int, Meta(ge=0)]
    accepted_tokens: Annotated[int, Meta(ge=0)]
    delayed_by_ms: dict[str, float]
    delayed_by_requests: list[SharedRequest]


def timings(usage: Usage, *, asked: bool = True) -> Timings | UnsetType:
    """The timings; UNSET where they are not `asked` for, or there was no token."""
    if not asked or (ttft := usage.ttft) is None:
        return UNSET
    return Timings(
        queue_ms=ttft.queue_s * 1000,
        prepare_ms=ttft.preprocess_s * 1000,
        prefill_ms=ttft.prefill_s * 1000,
        deliberation_ms=ttft.deliberation_s * 1000,
        first_token_ms=ttft.total_s * 1000,
        tokens_per_second=usage.tokens_per_s,
        cached_tokens=usage.cached_prompt_tokens,
        drafted_tokens=usage.drafted_tokens,
        accepted_tokens=usage.accepted_tokens,
        delayed_by_ms={cause: value * 1000 for cause, value in usage.delayed_by_s.items()},
        delayed_by_requests=[
            SharedRequest(each.request_id, each.cause, each.overlap_s * 1000) for each in usage.shared_with
        ],
    )
