"""What leaves the engine's core: tokens, ends and failures."""

from __future__ import annotations

import msgspec

from contract.errors import RequestFailure
from contract.outputs import ChoiceStatistics, FinishReason, FirstToken, TokenLogprobs
from engine.types.request import Request


class FirstTokenTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time between submission and first token went, with the moments for spans."""

    arrival_s: float
    first_scheduled_s: float
    prefill_end_s: float
    first_token_s: float
    cached_prompt_tokens: int
    # (start, end, tokens) of every prefill chunk.
    prefill_chunks: tuple[tuple[float, float, int], ...] = ()

    @property
    def parts(self) -> FirstToken:
        """What the gateway is told."""
        return FirstToken(
            queue_s=self.first_scheduled_s - self.arrival_s,
            prefill_s=self.prefill_end_s - self.first_scheduled_s,
            first_decode_s=self.first_token_s - self.prefill_end_s,
            cached_prompt_tokens=self.cached_prompt_tokens,
            num_prefill_chunks=len(self.prefill_chunks),
        )


class ChoiceHistory(ChoiceStatistics, kw_only=True):
    """What one choice took, with the moments for spans."""

    # (start, end) of every time out of the batch.
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
    statistics: ChoiceHistory | None = None
    # Computed so far of answers that are told at the end; in an event of its own.
    withheld_tokens: int = 0

    @classmethod
    def of_failure(
        cls, request: Request, failure: RequestFailure, statistics: ChoiceHistory | None = None
    ) -> TokenEvent:
        """The end of a whole request with an error; of its statistics, what was spent on it counts."""
        return cls(
            request_id=request.request_id,
            choice_index=request.choice_index,
            finish_reason=FinishReason.ERROR,
            failure=failure,
            statistics=statistics,
        )
