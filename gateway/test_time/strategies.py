"""Strategies: from what becomes of samples to what is done next.

A strategy is told of events and answers each with a Decision. It knows no engine, no clock and no text, and
draws nothing: the same events lead to the same steps, live and in `replay`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias

import msgspec

from gateway.test_time.confidence import Groups, threshold, window_of
from gateway.test_time.votes import decided, leader, votes_needed


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What is done next; nothing by default."""

    # Further samples that begin.
    start: int = 0
    # Steps that these go on from, one for each; empty where they begin with the prompt.
    parents: tuple[int, ...] = ()
    # Samples that end at once.
    end: tuple[int, ...] = ()
    # Samples whose scores are asked for.
    rate: tuple[int, ...] = ()
    # Ends all others.
    winner: int | None = None
    ended_by: str = ""


class Sample(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """A sample that has ended."""

    index: int
    # It ended by itself, neither by a limit nor by a failure.
    is_complete: bool
    # It has some answer, be it cut by a limit.
    is_answer: bool = True
    # It is a step of an answer that goes on.
    is_step: bool = False
    # It says something, and calls no tools.
    has_text: bool = True
    num_tokens: int = 0
    mean_logprob: float = 0.0
    vote: str | None = None


class Grown(msgspec.Struct, frozen=True, kw_only=True, tag="grown"):
    """Further tokens of a sample, by their confidences, or their log-probabilities where it is these that are
    watched.
    """

    index: int
    confidences: tuple[float, ...]
    # They are its last ones.
    is_over: bool = False


class Rated(msgspec.Struct, frozen=True, kw_only=True, tag="rated"):
    """Scores that were asked for."""

    scores: dict[int, float]


class Concluded(msgspec.Struct, frozen=True, kw_only=True, tag="concluded"):
    """There is no more time, or no more budget."""

    ended_by: str


class Unaffordable(msgspec.Struct, frozen=True, kw_only=True, tag="unaffordable"):
    """Nothing is under way, and the budget has no room for these samples that were to begin."""

    number: int


Event: TypeAlias = Sample | Grown | Rated | Concluded | Unaffordable
NOTHING = Decision()


class Strategy(Protocol):
    """Decides; see the module."""

    # Whether it is told of samples that grow.
    watches: bool

    def begin(self) -> Decision:
        """The first step; it starts something."""
        ...

    def take(self, event: Event) -> Decision:
        """What is done after an event."""
        ...

    def votes(self) -> Mapping[str, float]:
        """What was voted so far."""
        ...


def replay(strategy: Strategy, events: Iterable[Event]) -> list[Decision]:
    """The steps of a fresh strategy after recorded events."""
    return [strategy.begin(), *map(strategy.take, events)]


class Samples:
    """What all strategies keep of samples: a base."""

    watches = False

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._num_begun = 0
        self._ended: dict[int, Sample] = {}

    def take(self, event: Event) -> Decision:
        """See Strategy."""
        match event:
            case Sample():
                self._ended[event.index] = event
                return self._after(event)
            case Grown():
                return self._grown(event)
            case Rated():
                return self._rated(event.scores)
            case Concluded():
                return self._conclude(event.ended_by)
            case Unaffordable():
                self._num_begun -= event.number
                return self._unaffordable()

    def votes(self) -> Mapping[str, float]:
        """See Strategy."""
        return {}

    def _after(self, sample: Sample) -> Decision:
        raise NotImplementedError

    def _best(self) -> int | None:
        raise NotImplementedError

    def _grown(self, event: Grown) -> Decision:
        return NOTHING

    def _rated(self, scores: Mapping[int, float]) -> Decision:
        return NOTHING

    def _unaffordable(self) -> Decision:
        return self._conclude("budget")

    def _begin(self, number: int) -> Decision:
        number = min(number, self._num_samples - self._num_begun)
        self._num_begun += number
        return Decision(start=number)

    @property
    def _num_open(self) -> int:
        return self._num_begun - len(self._ended)

    def _conclude(self, ended_by: str) -> Decision:
        return Decision(winner=self._best(), ended_by=ended_by)

    def _likeliest(self, among: Iterable[Sample]) -> int | None:
        """The likeliest of some samples; the first of equals."""
        found = max(among, key=lambda each: (each.mean_logprob, -each.index), default=None)
        return None if found is None else found.index

    def _any(self) -> int | None:
        """The likeliest of the samples that ended by themselves; without one, of those that were cut."""
        complete = [each for each in self._ended.values() if each.is_complete]
        return self._likeliest(complete or (each for each in self._ended.values() if each.is_answer))


class BestSample(Samples):
    """The likeliest sample, or the one that scores best. All are rated together when all have ended; with
    `enough`, each when it ends, and one that scores so much ends the others. Of those as many begin as there
    are already, when none of these does: most are not needed.
    """

    def __init__(self, num_samples: int, *, rates: bool = False, enough: float = math.inf) -> None:
        super().__init__(num_samples)
        self._rates = rates
        self._enough = enough
        self._scores: dict[int, float] = {}
        self._num_asked = 0

    def begin(self) -> Decision:
        """See Strategy."""
        return self._begin(self._num_samples if self._enough == math.inf else 1)

    def _after(self, sample: Sample) -> Decision:
        if self._enough < math.inf and sample.is_complete:
            self._num_asked += 1
            return Decision(rate=(sample.index,))
        if self._num_open:
            return NOTHING
        complete = tuple(index for index, each in sorted(self._ended.items()) if each.is_complete)
        if self._rates and self._enough == math.inf and complete:
            self._num_asked = len(complete)
            return Decision(rate=complete)
        return self._more()

    def _rated(self, scores: Mapping[int, float]) -> Decision:
        self._scores.update(scores)
        if any(score >= self._enough for score in scores.values()):
            return Decision(winner=self._best(), ended_by="decided")
        return self._more()

    def _more(self) -> Decision:
        if self._num_open or len(self._scores) < self._num_asked:
            return NOTHING
        if self._num_begun < self._num_samples:
            return self._begin(self._num_begun)
        return self._conclude("all_samples")

    def _best(self) -> int | None:
        best = max(self._scores.values(), default=None)
        if best is None:
            return self._any()
        return self._likeliest(self._ended[index] for index, each in self._scores.items() if each == best)


class SelfConsistency(Samples):
    """The answer that most samples give (Wang et al., arXiv 2203.11171). As many begin at a time as could
    decide, and none after that; see `votes`.
    """

    def __init__(self, num_samples: int, confidence: float) -> None:
        super().__init__(num_samples)
        self._confidence = confidence

    def begin(self) -> Decision:
        """See Strategy."""
        return self._begin(votes_needed({}, 0, self._num_samples, self._confidence))

    def votes(self) -> Mapping[str, float]:
        """See Strategy."""
        votes: dict[str, float] = {}
        for sample in self._ended.values():
            if sample.vote is not None:
                votes[sample.vote] = votes.get(sample.vote, 0) + 1
        return votes

    def _after(self, sample: Sample) -> Decision:
        votes, num_cast = self.votes(), len(self._ended)
        if decided(votes, num_cast, self._num_samples, self._confidence):
            ended_by = "all_samples" if num_cast == self._num_samples else "decided"
            return Decision(winner=self._best(), ended_by=ended_by)
        if self._num_open:
            return NOTHING
        if self._num_begun < self._num_samples:
            return self._begin(votes_needed(votes, num_cast, self._num_samples, self._confidence))
        return self._conclude("all_samples")

    def _best(self) -> int | None:
        answer = leader(self.votes())
        if answer is None:
            return self._any()
        return self._likeliest(each for each in self._ended.values() if each.vote == answer)


class RatedVotes(Samples):
    """The answer whose samples score most together (Li et al., arXiv 2206.02336): an unsure judge says more
    of several that agree than of one. All begin, and all that voted are rated when all have ended.
    """

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples)
        self._scores: Mapping[int, float] = {}

    def begin(self) -> Decision:
        """See Strategy."""
        return self._begin(self._num_samples)

    def votes(self) -> Mapping[str, float]:
        """See Strategy. What scores less than 0 has no weight; without scores all weigh alike."""
        votes: dict[str, float] = {}
        for index, sample in sorted(self._ended.items()):
            if sample.vote is not None:
                weight = max(0.0, self._scores.get(index, 0.0)) if self._scores else 1.0
                votes[sample.vote] = votes.get(sample.vote, 0.0) + weight
        return votes

    def _after(self, sample: Sample) -> Decision:
        if self._num_open:
            return NOTHING
        voters = tuple(index for index, each in sorted(self._ended.items()) if each.vote is not None)
        return Decision(rate=voters) if voters else self._conclude("all_samples")

    def _rated(self, scores: Mapping[int, float]) -> Decision:
        self._scores = scores
        return self._conclude("all_samples")

    def _best(self) -> int | None:
        answer = leader(self.votes())
        if answer is None:
            return self._any()
        among = [each for each in self._ended.values() if each.vote == answer]
        return max(among, key=lambda each: (self._scores.get(each.index, 0.0), -each.index)).index


class DeepConf(Samples):
    """Votes that weigh as much as the weakest group of their trace (arXiv 2508.15260, online). Half of the
    traces warm up, and all of those vote; of the others one that falls below their threshold ends at once. It
    is over when one answer has the asked share of the weights.
    """

    watches = True
    _MAX_WARM_UP = 16

    def __init__(self, num_samples: int, confidence: float) -> None:
        super().__init__(num_samples)
        self._confidence = confidence
        self._num_warming = min(self._MAX_WARM_UP, (num_samples + 1) // 2)
        self._groups: dict[int, Groups] = {}
        self._weights: dict[int, float] = {}
        # Unknown while traces warm up.
        self._window = 0
        self._threshold = -math.inf

    def begin(self) -> Decision:
        """See Strategy."""
        return self._begin(self._num_warming)

    def votes(self) -> Mapping[str, float]:
        """See Strategy."""
        votes: dict[str, float] = {}
        for index, weight in self._weights.items():
            answer = self._ended[index].vote
            if answer is not None:
                votes[answer] = votes.get(answer, 0.0) + weight
        return votes

    def _grown(self, event: Grown) -> Decision:
        groups = self._groups.setdefault(event.index, Groups())
        num_before = len(groups)
        groups.add(event.confidences)
        if not self._window or len(groups) < self._window:
            return NOTHING
        if groups.weakest(self._window, since=num_before) >= self._threshold:
            return NOTHING
        self._ended[event.index] = Sample(index=event.index, is_complete=False, is_answer=False)
        after = self._next()
        return msgspec.structs.replace(after, end=(event.index,))

    def _after(self, sample: Sample) -> Decision:
        if self._window:
            self._weigh(sample)
        elif not self._num_open:
            self._warmed_up()
        return self._next()

    def _warmed_up(self) -> None:
        warm = [each for each in self._ended.values() if each.is_complete and each.index in self._groups]
        lengths = [len(self._groups[each.index]) for each in warm]
        self._window = window_of(lengths) if lengths else 1
        weakest = [self._groups[each.index].weakest(self._window) for each in warm]
        self._threshold = threshold(weakest) if weakest else -math.inf
        for each in warm:
            self._weigh(each)

    def _weigh(self, sample: Sample) -> None:
        groups = self._groups.get(sample.index)
        if groups is not None and sample.is_complete:
            self._weights[sample.index] = groups.weakest(self._window)

    def _next(self) -> Decision:
        if not self._window:
            return NOTHING
        votes = self.votes()
        total = math.fsum(votes.values())
        if total and max(votes.values()) / total >= self._confidence:
            ended_by = "all_samples" if len(self._ended) == self._num_samples else "decided"
            return Decision(winner=self._best(), ended_by=ended_by)
        if self._num_begun < self._num_samples:
            return self._begin(self._num_samples)
        return NOTHING if self._num_open else self._conclude("all_samples")

    def _best(self) -> int | None:
        answer = leader(self.votes())
        if answer is None:
            return self._any()
        among: Sequence[int] = [index for index in self._weights if self._ended[index].vote == answer]
        return max(among, key=lambda index: (self._weights[index], -index))
