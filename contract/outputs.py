"""What comes back from an engine for one choice: tokens, their log-probabilities, why it ended, what it took.

Times are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import IntEnum

import msgspec


class FinishReason(IntEnum):
    """Why a choice ended. Numbers equal those of millrace.common.v1.FinishReason."""

    STOP = 1
    LENGTH = 2
    TOOL_CALLS = 3
    CANCELLED = 4
    DEADLINE = 5
    ERROR = 6
    BUDGET = 7


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability (natural) of one token and of its most likely alternatives, best first."""

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()

    @property
    def top(self) -> Iterator[tuple[int, float]]:
        """(id, log-probability) of the alternatives."""
        return zip(self.top_ids, self.top_logprobs, strict=True)

    def confidence(self, number: int) -> float:
        """How sure the model was, by the most likely `number` of the alternatives: minus the mean of their
        log-probabilities (DeepConf: Fu et al., arXiv 2508.15260). Where one stands out, the others are
        unlikely, and it is high. Tokens that a constraint forbids do not count.
        """
        allowed = [each for each in self.top_logprobs[:number] if each > -math.inf]
        return -math.fsum(allowed) / len(allowed) if allowed else 0.0


class FirstToken(msgspec.Struct, frozen=True):
    """Where the engine's part of the time to the first token went."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    first_decode_s: float = 0.0
    cached_prompt_tokens: int = 0
    num_prefill_chunks: int = 0


class EngineTime(msgspec.Struct):
    """Seconds of an engine that were spent on a request, by what they were spent on: of the time that a step
    took, each sequence has the part of its work, so that all requests' seconds are those of all steps.
    """

    prefill_s: float = 0.0
    decode_s: float = 0.0
    # Drafts that were verified and thrown away.
    speculative_waste_s: float = 0.0
    # Time for computing again what preemptions and failed steps had lost.
    recompute_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All of them."""
        return math.fsum(msgspec.structs.astuple(self))

    def __add__(self, other: EngineTime) -> EngineTime:
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return EngineTime(*(own + its for own, its in pairs))


class ChoiceStatistics(msgspec.Struct):
    """What one choice took over its whole life, counted while it goes on."""

    num_steps: int = 0
    num_preemptions: int = 0
    recomputed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    decode_s: float = 0.0
    grammar_s: float = 0.0
    # Tokens of candidates and beams, which are computed and not returned; reported with the first choice.
    candidate_tokens: int = 0
    # Shares of attention that its tokens lost at most by what was forgotten, summed; where that is measured.
    lost_tokens: float = 0.0
    # The whole request's, since the last choice before this one ended.
    engine_time: EngineTime = msgspec.field(default_factory=EngineTime)
    # Named cause to seconds lost.
    delayed_by_s: dict[str, float] = {}

    def add(self, other: ChoiceStatistics) -> None:
        """Counts what another choice, or the same one on another engine, took."""
        for name in NUMBERS[:-1]:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for cause, seconds in other.delayed_by_s.items():
            self.delayed_by_s[cause] = self.delayed_by_s.get(cause, 0.0) + seconds


# Numbers that an engine reports of a choice; the causes of delay come last.
NUMBERS: tuple[str, ...] = ChoiceStatistics.__struct_fields__
