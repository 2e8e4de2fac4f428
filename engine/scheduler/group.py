"""All choices of one request, and what they report together."""

from __future__ import annotations

from engine.scheduler.beams import BeamSearch
from engine.scheduler.best_of import BestOf
from engine.scheduler.sequence import Sequence, Status
from engine.types import FirstTokenTimings, Request, TokenLogprobs


class RequestGroup:
    """One request with its sequences. Lives until every choice has ended or the request failed."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.sequences: list[Sequence] = []
        self.num_finished = 0
        self.first_scheduled_s: float | None = None
        self.cached_prompt_tokens = 0
        self.prefill_chunks: list[tuple[float, float, int]] = []
        self.first_token_reported = False
        self.best_of: BestOf | None = None
        self.beams: BeamSearch | None = None
        # Kept for the answers, which all come at the end.
        self.beam_first_token: FirstTokenTimings | None = None
        self.beam_prompt_logprobs: list[TokenLogprobs] = []

    @property
    def held(self) -> list[Sequence]:
        """Choices that wait for the first one to compute the prompt."""
        return [sequence for sequence in self.sequences if sequence.status is Status.HELD]

    def take_first_token_timings(self, prefill_end_s: float, now: float) -> FirstTokenTimings | None:
        """Timings for the request's first token; None ever after."""
        if self.first_token_reported:
            return None
        self.first_token_reported = True
        arrival = self.request.arrival_s
        return FirstTokenTimings(
            arrival_s=arrival,
            first_scheduled_s=arrival if self.first_scheduled_s is None else self.first_scheduled_s,
            prefill_end_s=prefill_end_s,
            first_token_s=now,
            cached_prompt_tokens=self.cached_prompt_tokens,
            prefill_chunks=tuple(self.prefill_chunks),
        )
