"""Whether drafts pay, in measured time.

A plain decode step of B sequences takes t and yields B tokens, so a token is worth t / B. Drafts cost the
time to propose them and the time that a step takes longer because it verifies them. A sequence gets the
number of drafts with the largest gain, expected tokens times their worth less the costs; none where nothing
gains. All times are medians of the latest measurements on this machine, by size of the batch, so a slow draft
model, a small target, a full batch and a busy machine all count by what they cost.

What a sequence accepts is estimated from its own drafts, beginning with what others accepted lately. Where
nothing pays, all sequences try again from time to time, ever less often.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from engine.runner.speculation.answers import AnswerMatch

# A draft must gain so much more than it costs: at least, as costs are measured with noise, and at most. In
# between decides what steps with drafts really gained.
LEAST_MARGIN, MOST_MARGIN = 1.15, 4.0
_MARGIN_UP, _MARGIN_DOWN, _BALANCE_FADING = 1.1, 0.9, 0.9
# Decided drafts that the experience with other sequences counts for.
_PRIOR = 6.0
# Decay of that experience per round, and where it begins.
_FADING, _FIRST_SHARE, _FIRST_WEIGHT = 0.98, 0.6, 12.0
# Steps with drafts after which a plain one is measured again.
_REFRESH_STEPS = 64
# Steps between trials where nothing pays: at first, and at most. Look-ups cost little.
_FIRST_TRIAL, _LAST_TRIAL, _LAST_LOOKUP_TRIAL = 16, 256, 32
_TRIAL_DRAFTS = 2
# Rounds over which what a draft model reads first must pay, and tokens that a round adds anyway.
_READ_ROUNDS, _FEW_TOKENS = 8, 8


@dataclass(kw_only=True)
class DraftProgress:
    """How its drafts fared, and how far the draft model has read."""

    # Drafts that were decided: all that were accepted, and the first of each round that was not.
    num_tried: int = 0
    num_accepted: int = 0
    # Prompt look-ups, and those that found something.
    num_lookups: int = 0
    num_found: int = 0
    # The latest proposal was forced by the grammar, and says nothing of speculation.
    forced: bool = False
    # Leading tokens whose keys and values the draft model has under the sequence's own blocks.
    num_read: int = 0
    # Tokens that it would have to read first.
    num_unread: int = 0
    # Tokens that were known when the latest drafts were made, and the position up to which blocks were its
    # own.
    num_known: int = 0
    num_owned: int = 0
    num_proposed: int = 0
    # Where its text stands in its owner's recent answers.
    match: AnswerMatch | None = None

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """Takes in how the latest drafts fared."""
        self.num_accepted += num_accepted
        self.num_tried += num_accepted + (num_accepted < num_drafted)
        # The draft model has read every draft but its last; what lies in scratch blocks is lost.
        read = self.num_known + min(num_accepted, self.num_proposed - 1)
        self.num_read = max(self.num_read, min(read, self.num_owned))


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """A step that was computed: forward, logits and sampling, without proposing."""

    seconds: float
    num_sequences: int
    num_drafts: int
    num_accepted: int = 0
    # Whether every sequence decoded.
    decodes_only: bool


class _Recent:
    """Median of the latest few measurements; 0 while there are none."""

    __slots__ = ("_values", "value")

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=9)
        self.value = 0.0

    def add(self, value: float) -> None:
        """Takes one in."""
        self._values.append(value)
        self.value = median(self._values)


@dataclass
class _Costs:
    """Measurements for batches of one size, in seconds."""

    plain: _Recent = field(default_factory=_Recent)
    per_row: _Recent = field(default_factory=_Recent)
    per_draft: _Recent = field(default_factory=_Recent)
    per_read: _Recent = field(default_factory=_Recent)
    steps_since_plain: int = 0
    steps_since_trial: int = 0
    trial_interval: int = _FIRST_TRIAL
    margin: float = LEAST_MARGIN
    # Plain steps that drafts saved, less those that they cost, over the latest steps with drafts.
    balance: float = 0.0


class Economics:
    """Decides how many drafts each sequence gets."""

    def __init__(self, max_drafts: int, min_acceptance: float) -> None:
        self.max_drafts = max_drafts
        self.min_acceptance = min_acceptance
        self._sizes: dict[int, _Costs] = {}
        # Time of the latest proposal.
        self._proposing_s = 0.0
        self._accepted = _FIRST_SHARE * _FIRST_WEIGHT
        self._tried = _FIRST_WEIGHT

    def stepped(self, step: StepCost) -> None:
        """Books what a step took."""
        if not step.decodes_only:
            return
        costs = self._costs(step.num_sequences)
        if not step.num_drafts:
            costs.plain.add(step.seconds)
            costs.steps_since_plain = 0
            return
        costs.steps_since_plain += 1
        if costs.plain.value:
            costs.per_row.add(max(0.0, step.seconds - costs.plain.value) / step.num_drafts)
            self._settle(costs, step)

    def _settle(self, costs: _Costs, step: StepCost) -> None:
        """Compares a step with drafts, proposing included, with the plain steps that it stood for."""
        plain_s = costs.plain.value
        saved = 1 + step.num_accepted / step.num_sequences
        spent = (step.seconds + self._proposing_s) / plain_s
        costs.balance = _BALANCE_FADING * costs.balance + saved - spent
        if costs.balance < 0:
            costs.margin = min(costs.margin * _MARGIN_UP, MOST_MARGIN)
        else:
            costs.margin = max(costs.margin * _MARGIN_DOWN, LEAST_MARGIN)

    def proposed(self, num_sequences: int, num_rounds: int, seconds: float, num_read: int = 0) -> None:
        """Books what proposing took: so many drafts one after another, or look-ups. `num_read` tokens were
        read before, beyond those that every round adds.
        """
        costs = self._costs(num_sequences)
        self._proposing_s = seconds
        if not num_read:
            costs.per_draft.add(seconds / num_rounds)
            return
        drafting = num_rounds * costs.per_draft.value
        costs.per_read.add(max(0.0, seconds - drafting) / num_read)

    def verified(self, progress: DraftProgress, num_drafted: int, num_accepted: int) -> None:
        """Books how drafts fared."""
        progress.verified(num_drafted, num_accepted)
        self._accepted = self._accepted * _FADING + num_accepted
        self._tried = self._tried * _FADING + num_accepted + (num_accepted < num_drafted)

    @staticmethod
    def extra_tokens(progress: DraftProgress) -> int:
        """Tokens to read before drafting, beyond those that every round adds."""
        return progress.num_unread if progress.num_unread > _FEW_TOKENS else 0

    def drafts(self, sequences: list[DraftProgress], *, looks_up: bool) -> list[int]:
        """How many drafts each of the sequences of the next step gets. With `looks_up`, each pays for its own
        look-up, found or not; otherwise all share the draft model's forwards.
        """
        if not self.min_acceptance:
            return [self.max_drafts] * len(sequences)
        costs = self._costs(len(sequences))
        if not costs.plain.value or costs.steps_since_plain >= _REFRESH_STEPS:
            # Without a plain step nothing can be compared.
            return [0] * len(sequences)
        chosen = [0] * len(sequences)
        num_sharing = len(sequences)
        for _ in range(2):
            chosen = [self._best(each, costs, len(sequences), num_sharing, looks_up) for each in sequences]
            num_sharing = sum(map(bool, chosen))
            if looks_up or not num_sharing:
                break
        if any(chosen):
            costs.trial_interval = _FIRST_TRIAL
            costs.steps_since_trial = 0
            return chosen
        costs.steps_since_trial += 1
        if costs.steps_since_trial < costs.trial_interval:
            return chosen
        costs.steps_since_trial = 0
        last = _LAST_LOOKUP_TRIAL if looks_up else _LAST_TRIAL
        costs.trial_interval = min(2 * costs.trial_interval, last)
        return self._trial(sequences, looks_up)

    def _trial(self, sequences: list[DraftProgress], looks_up: bool) -> list[int]:
        """A few drafts for all, or for the one that the draft model has the least to read of."""
        count = min(_TRIAL_DRAFTS, self.max_drafts)
        if looks_up:
            return [count] * len(sequences)
        cheapest = min(range(len(sequences)), key=lambda index: sequences[index].num_unread)
        return [count if index == cheapest else 0 for index in range(len(sequences))]

    def acceptance(self, progress: DraftProgress) -> float:
        """Probability that the sequence's next draft is accepted."""
        prior = self._accepted / self._tried
        return (progress.num_accepted + _PRIOR * prior) / (progress.num_tried + _PRIOR)

    def _best(
        self, progress: DraftProgress, costs: _Costs, num_sequences: int, num_sharing: int, looks_up: bool
    ) -> int:
        share = self.acceptance(progress)
        if share < self.min_acceptance:
            return 0
        worth = costs.plain.value / num_sequences
        each = costs.per_row.value
        if looks_up:
            # Paid once, found or not.
            first = costs.per_draft.value * (progress.num_lookups + 2) / (progress.num_found + 1)
        else:
            first = self.extra_tokens(progress) * costs.per_read.value / _READ_ROUNDS
            each += costs.per_draft.value / num_sharing
        best, most, gain = 0, 0.0, -costs.margin * first
        probability = share
        for count in range(1, self.max_drafts + 1):
            more = probability * worth - costs.margin * each
            if more <= 0:
                break
            gain += more
            probability *= share
            if gain > most:
                best, most = count, gain
        return best

    def _costs(self, num_sequences: int) -> _Costs:
        return self._sizes.setdefault(num_sequences.bit_length(), _Costs())
