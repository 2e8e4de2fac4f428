"""What leaves the engine's core: tokens, ends and failures."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from engine.types.sampling import TokenLogprobs


class FinishReason(IntEnum):
    """Why a choice ended. Numbers equal those of millrace.common.v1.FinishReason."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 4
    DEADLINE = 5
    ERROR = 6


class RequestFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A domain error in plain data; `reason` is a name from the error table."""

    reason: str
    message: str
    field: str = ""
    metadata: dict[str, str] = {}
    retry_after_s: float | None = None


class FirstTokenTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time between submission and first token went, with the moments for spans."""

    arrival_s: float
    first_scheduled_s: float
    prefill_end_s: float
    first_token_s: float
    cached_prompt_tokens: int
    # (start, end, tokens) of every prefill chunk.
    prefill_chunks: tuple[tuple[float, float, int], ...] = ()


class ChoiceStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What one choice took, over its whole life."""

    num_steps: int = 0
    num_preemptions: int = 0
    recomputed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    decode_s: float = 0.0
    grammar_s: float = 0.0
    # Named cause to seconds lost.
    delayed_by_s: dict[str, float] = {}
    # (start, end) of every time out of the batch, for spans.
    absences_s: tuple[tuple[float, float], ...] = ()
    # (start, end, tokens computed again) of every return to the batch, up to the next token.
    comebacks_s: tuple[tuple[float, float, int], ...] = ()
    # (start, end, tokens) of every step that brought blocks back from host memory.
    restores_s: tuple[tuple[float, float, int], ...] = ()


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one choice in one step, or its end. Every request ends in exactly one terminal event
    per choice, or in one failure for the whole request.
    """

    request_id: int
    choice_index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    failure: RequestFailure | None = None
    first_token: FirstTokenTimings | None = None
    statistics: ChoiceStatistics | None = None
