"""Beam search: the `width` most likely continuations go on together, and the best `n` are returned.

Every beam is an ordinary sequence that asks for the log-probabilities of its 2 * width most likely next
tokens. When all beams of a request have reported, the best candidates over all of them become the next
beams: new sequences that share their parent's blocks (copy-on-write of the block they write to). A candidate
that ends with a stop token and ranks among the first `width` is finished. The search ends with `width`
finished hypotheses, or at the length limit; hypotheses are compared by mean log-probability.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, islice

from engine.scheduler.sequence import Sequence
from engine.types import FinishReason, FirstTokenTimings, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Candidate:
    """A beam with one more token."""

    parent: Sequence
    token_id: int
    logprob: float
    # Sum over all generated tokens.
    score: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished answer."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    mean_logprob: float
    reason: FinishReason
    stop_token_id: int | None


class BeamSearch:
    """The state of one request's search."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._reported: dict[int, TokenLogprobs] = {}
        self._finished: list[Hypothesis] = []
        # One for each beam of each step.
        self.num_tokens = 0
        # Kept for the answers, which all come at the end.
        self.first_token: FirstTokenTimings | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []

    def report(self, sequence: Sequence, alternatives: TokenLogprobs) -> None:
        """Takes in what may follow one beam."""
        self._reported[sequence.sequence_id] = alternatives

    def is_complete(self, beams: list[Sequence]) -> bool:
        """Whether every beam has reported."""
        return all(beam.sequence_id in self._reported for beam in beams)

    def advance(self, beams: list[Sequence]) -> list[Candidate]:
        """The next beams; empty when the search has ended."""
        candidates = sorted(
            (
                Candidate(beam, token_id, logprob, beam.sum_logprob + logprob)
                for beam in beams
                for reported in (self._reported[beam.sequence_id],)
                for token_id, logprob in zip(reported.top_ids, reported.top_logprobs, strict=True)
            ),
            key=lambda each: (-each.score, each.parent.sequence_id, each.token_id),
        )
        self._reported.clear()
        self.num_tokens += len(beams)
        width = self._sampling.beam_width
        chosen: list[Candidate] = []
        passed_over: list[Candidate] = []
        for index, candidate in enumerate(candidates):
            if len(chosen) == width:
                break
            if not self._stops(candidate):
                chosen.append(candidate)
            elif index < width:
                self._finish(candidate, FinishReason.STOP)
            else:
                passed_over.append(candidate)
        if len(self._finished) >= width:
            return []
        if not chosen:
            # Every beam can only end, as a grammar may want it.
            for candidate in passed_over:
                self._finish(candidate, FinishReason.STOP)
            return []
        if chosen[0].parent.num_known + 1 >= chosen[0].parent.max_tokens_total:
            for candidate in chosen:
                self._finish(candidate, FinishReason.LENGTH)
            return []
        return chosen

    def best(self) -> list[Hypothesis]:
        """The `n` answers to return, best first. Where a grammar or a list of allowed tokens has fewer, they
        come again from the best on.
        """
        ranked = sorted(self._finished, key=lambda each: (-each.mean_logprob, each.token_ids))
        return list(islice(cycle(ranked), self._sampling.n))

    def _stops(self, candidate: Candidate) -> bool:
        length = candidate.parent.num_output_tokens + 1
        return candidate.token_id in self._sampling.stop_token_ids and length >= self._sampling.min_tokens

    def _finish(self, candidate: Candidate, reason: FinishReason) -> None:
        parent = candidate.parent
        token_ids = (*parent.token_ids[parent.num_prompt_tokens :], candidate.token_id)
        self._finished.append(
            Hypothesis(
                token_ids,
                (*parent.beam_logprobs, TokenLogprobs(candidate.token_id, candidate.logprob)),
                candidate.score / len(token_ids),
                reason,
                candidate.token_id if reason is FinishReason.STOP else None,
            )
        )
