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

from engine.runner.speculation.progress import DraftProgress

# A draft must gain so much more than it costs, since costs are measured with noise.
MARGIN = 1.15
# Decided drafts that the experience with other sequences counts for.
_PRIOR = 6.0
# Decay of that experience per round, and where it begins.
_FADING, _FIRST_SHARE, _FIRST_WEIGHT = 0.98, 0.6, 12.0
# Steps with drafts after which a plain one is measured again.
_REFRESH_STEPS = 64
# Steps between trials where nothing pays: at first, and at most.
_FIRST_TRIAL, _LAST_TRIAL = 16, 256
_TRIAL_DRAFTS = 2
# Rounds over which what a draft model reads first must pay, and tokens that a round adds anyway.
_READ_ROUNDS, _FEW_TOKENS = 32, 8


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """A step that was computed: forward, logits and sampling, without proposing."""

    seconds: float
    num_sequences: int
    num_drafts: int
    # Whether every sequence decoded.
    decodes_only: bool


@dataclass
class _Costs:
    """Latest measurements for batches of one size, in seconds."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=9))
    per_row: deque[float] = field(default_factory=lambda: deque(maxlen=9))
    per_draft: deque[float] = field(default_factory=lambda: deque(maxlen=9))
    per_read: deque[float] = field(default_factory=lambda: deque(maxlen=9))
    steps_since_plain: int = 0
    steps_since_trial: int = 0
    trial_interval: int = _FIRST_TRIAL


class Economics:
    """Decides how many drafts each sequence gets."""

    def __init__(self, max_drafts: int, min_acceptance: float) -> None:
        self.max_drafts = max_drafts
        self.min_acceptance = min_acceptance
        self._sizes: dict[int, _Costs] = {}
        self._accepted = _FIRST_SHARE * _FIRST_WEIGHT
        self._tried = _FIRST_WEIGHT

    def stepped(self, step: StepCost) -> None:
        """Books what a step took."""
        if not step.decodes_only:
            return
        costs = self._costs(step.num_sequences)
        if not step.num_drafts:
            costs.plain.append(step.seconds)
            costs.steps_since_plain = 0
            return
        costs.steps_since_plain += 1
        if costs.plain:
            costs.per_row.append(max(0.0, step.seconds - median(costs.plain)) / step.num_drafts)

    def proposed(self, num_sequences: int, num_rounds: int, seconds: float, num_read: int = 0) -> None:
        """Books what proposing took: so many drafts one after another, or look-ups. `num_read` tokens were
        read before, beyond those that every round adds.
        """
        costs = self._costs(num_sequences)
        if not num_read:
            costs.per_draft.append(seconds / num_rounds)
            return
        drafting = num_rounds * median(costs.per_draft) if costs.per_draft else 0.0
        costs.per_read.append(max(0.0, seconds - drafting) / num_read)

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
        if not costs.plain or costs.steps_since_plain >= _REFRESH_STEPS:
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
        costs.trial_interval = min(2 * costs.trial_interval, _LAST_TRIAL)
        return self._trial(sequences, looks_up)

    def _trial(self, sequences: list[DraftProgress], looks_up: bool) -> list[int]:
        """A few drafts for all, or for the one that the draft model has the least to read of."""
        count = min(_TRIAL_DRAFTS, self.max_drafts)
        if looks_up:
            return [count] * len(sequences)
        cheapest = min(range(len(sequences)), key=lambda place: sequences[place].num_unread)
        return [count if place == cheapest else 0 for place in range(len(sequences))]

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
        worth = median(costs.plain) / num_sequences
        per_row = median(costs.per_row) if costs.per_row else 0.0
        proposing = median(costs.per_draft) if costs.per_draft else 0.0
        found = (progress.num_found + 1) / (progress.num_lookups + 2)
        first = 0.0
        if not looks_up and costs.per_read:
            first = self.extra_tokens(progress) * median(costs.per_read) / _READ_ROUNDS
        best, most = 0, 0.0
        expected = 0.0
        for count in range(1, self.max_drafts + 1):
            expected += share**count
            cost = first + count * per_row
            cost += proposing / found if looks_up else count * proposing / num_sharing
            gain = expected * worth - MARGIN * cost
            if gain > most:
                best, most = count, gain
        return best

    def _costs(self, num_sequences: int) -> _Costs:
        return self._sizes.setdefault(num_sequences.bit_length(), _Costs())
