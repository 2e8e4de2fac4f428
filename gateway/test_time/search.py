"""A search over steps: some continuations of each answer so far, of which a judge of steps keeps the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.test_time.strategies import NOTHING, Decision, Sample, Samples

# Of a level's candidates one in so many is kept.
_PER_KEPT = 4
# Steps of an answer at most.
MAX_STEPS = 64


class StepSearch(Samples):
    """Beam search under a process reward model (Snell et al., arXiv 2408.03314). Every level begins as many
    steps, children of those that were kept, or as many as the budget has room for; when all have ended, the
    best of them are kept. It is over when all that are kept are answers; the one that scores best is given.
    """

    def __init__(self, num_samples: int, *, rates: bool) -> None:
        super().__init__(num_samples)
        self._rates = rates
        self._num_kept = max(1, num_samples // _PER_KEPT)
        self._level: Sequence[int] = ()
        # By the level at which they were given.
        self._scores: list[dict[int, float]] = []
        # Some were never begun, because the budget had no room for them.
        self._is_narrowed = False

    def begin(self) -> Decision:
        """See Strategy."""
        return self._grow([])

    def _grow(self, parents: Sequence[int]) -> Decision:
        number = self._num_samples
        self._level = range(self._num_begun, self._num_begun + number)
        self._num_begun += number
        shares = tuple(parents[place * len(parents) // number] for place in range(number) if parents)
        return Decision(start=number, parents=shares)

    def _after(self, sample: Sample) -> Decision:
        if any(index not in self._ended for index in self._level):
            return NOTHING
        alive = tuple(index for index in self._level if self._is_candidate(index))
        if not alive:
            return self._conclude("all_samples")
        if self._rates:
            return Decision(rate=alive)
        return self._rated({index: self._ended[index].mean_logprob for index in alive})

    def _unaffordable(self) -> Decision:
        # What has begun of the level is all of it.
        self._is_narrowed = True
        self._level = range(self._level[0], self._num_begun)
        return self._after(self._ended[self._level[-1]]) if self._level else self._conclude("budget")

    def _conclude(self, ended_by: str) -> Decision:
        return super()._conclude("budget" if self._is_narrowed else ended_by)

    def _is_candidate(self, index: int) -> bool:
        return self._ended[index].is_step or self._ended[index].is_complete

    def _rated(self, scores: Mapping[int, float]) -> Decision:
        self._scores.append(dict(scores))
        kept = sorted(scores, key=lambda index: (-scores[index], index))[: self._num_kept]
        steps = sorted(index for index in kept if self._ended[index].is_step)
        if steps and len(self._scores) < MAX_STEPS:
            return self._grow(steps)
        return self._conclude("all_samples" if steps else "decided")

    def _best(self) -> int | None:
        scored = {index: score for level in self._scores for index, score in level.items()}
        answers = {index: score for index, score in scored.items() if self._ended[index].is_complete}
        # Without an answer, what has come furthest.
        among = answers or (self._scores[-1] if self._scores else {})
        if not among:
            return self._any()
        return max(among, key=lambda index: (among[index], -index))
