"""Whether drafts pay, in measured time, for the whole step and for every tenant in it.

A plain decode step of B sequences takes t and yields B tokens. With drafts a step takes longer, because they
are proposed and verified, and yields more. So many drafts are verified as make the expected tokens a second
the most, each sequence's likeliest first; and only as many as leave every tenant at least what it has
without: a tenant whose own drafts bring it nothing bears no more than a hundredth of a step for others'.

Step times are medians of the latest measurements on this machine by rows (step_times), so a slow draft model,
a small target, a full batch and a busy machine all count by what they cost. What a sequence accepts is
estimated from its own drafts, place by place (acceptance), beginning with what its tenant's others accepted
lately; that a tenant gains is believed of its sequences' own drafts alone. Drafts that are not verified are
compared with what is drawn all the same, so that what never holds costs no row.

A rate says nothing of how evenly tokens come. Late are those of a sequence whose latest eight took longer
than by plain steps, so all for which it waits while others gain. That befalls less than one in a hundred of a
tenant's tokens, or fewer than were as early (owners); beyond that, no step in which it takes part is longer
than a plain one.

Deciding takes time as well, and so does what a drafter keeps of steps. All that speculation took, less what
it saved, is paid from a purse for batches of each size, into which goes half a percent of the time of steps.
Once it is empty nobody looks, keeps or decides anything, until enough is in it for the next attempt: what
never pays takes half a percent, whatever a look costs, and what pays is never interrupted.

Shape letters: S sequences, N drafts, P places behind the last token, O owners.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.runner.speculation.acceptance import Acceptance
from engine.runner.speculation.owners import LEAST_MARGIN, SLACK, Owners, all_gain, leaves_each_as_much
from engine.runner.speculation.progress import NOT_LATE, PACE_TOKENS, DraftProgress
from engine.runner.speculation.step_times import FEW, Recent, StepTimes, size_class

# A draft must gain so many times what it costs at most. Between that and LEAST_MARGIN decides what steps with
# drafts really gained.
_MOST_MARGIN = 4.0
_MARGIN_UP, _MARGIN_DOWN, _BALANCE_FADING = 1.1, 0.9, 0.9
# How many drafts the experience with an owner's others counts for beside that with one sequence.
_PRIOR = 2.0
# Steps with drafts after which plain ones are measured again.
_REFRESH_STEPS = 64
# Part of the time of steps that goes into trials; and plain steps that they may cost before they earned it.
_TRIAL_SHARE, _FIRST_CREDIT, _MOST_CREDIT = 0.005, 1.0, 3.0
_LARGEST_TRIAL = 0.9
# An attempt is so many steps in which somebody looks, and the trial that was wanted last. For each step of it
# that was felt there are so many in which nobody looks: fewer than a hundredth, so that no 99th percentile is
# theirs.
_ATTEMPT_STEPS, _REST_INTERVAL, _MOST_FELT = 2, 128, 64
# Steps before the next attempt of which a drafter keeps what it needs, so that it knows the latest text.
_WAKING_STEPS = 32
# Steps between two of which the time is taken while nobody looks.
_PASSING_STEPS = 16
# Drafts that a draft model makes in a trial.
_TRIAL_ROUNDS = 2
# Part of a plain step that lookups may have cost in vain.
_MOST_IN_VAIN = 0.1
# Rounds over which what a draft model reads first must pay, and tokens that a round adds anyway.
_READ_ROUNDS, _FEW_TOKENS = 8, 8
# Of the time that an answer took, what looking back at it may take; and of a step, so that nobody waits.
# Each rest that was ended in vain doubles the answers that are not heard, up to this power.
_LOOK_BACK_SHARE, _MOST_LOOK_BACK, _MOST_UNHEARD = 0.0025, 0.5, 8


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """A step that was computed: forward, logits and sampling, without what a drafter did."""

    seconds: float
    num_sequences: int
    # Rows beside the last token of each, those of branches included.
    num_drafts: int
    num_accepted: int = 0
    # Whether every sequence decoded.
    decodes_only: bool


@dataclass
class _Costs:
    """What is known of batches of one size."""

    # Seconds of a draft model's round, or of one lookup; and of reading a token first.
    per_draft: Recent = field(default_factory=Recent)
    per_read: Recent = field(default_factory=Recent)
    steps_since_plain: int = 0
    margin: float = LEAST_MARGIN
    # Plain steps that drafts saved, less those that they cost, over the latest steps with drafts.
    balance: float = 0.0
    # The purse: seconds that may be lost. What looking takes in a step, and what the latest trial would have.
    credit_s: float = 0.0
    looking: Recent = field(default_factory=Recent)
    trial_s: float = 0.0
    # Steps left in which nobody looks; and those since the latest gain that were longer for it.
    num_resting: int = 0
    num_felt: int = 0
    # Rests that looking back ended, since one after which more was gained than lost; answers that end before
    # the next may; and what was gained since the latest.
    num_woken: int = 0
    num_unheard: int = 0
    since_woken_s: float = 0.0
    # Whose turn it is to be looked up in a trial, and how often drafts were verified in one.
    turn: int = 0
    num_trials: int = 0
    # What lookups were expected to gain, less their time, over the latest of them.
    worth_s: float = 0.0


class Economics:
    """Decides how many drafts each sequence gets."""

    def __init__(
        self,
        max_drafts: int,
        min_acceptance: float,
        *,
        wakes_early: bool = False,
        rows_beside: Sequence[int] = (),
    ) -> None:
        """`wakes_early`: some steps are seen before an attempt. `rows_beside`: what a sequence that drafts
        computes beside each of its drafts, in their order.
        """
        # [P + 1] a draft's own row and those beside it; further drafts have none beside.
        self._rows_each = np.ones(max_drafts + 1, np.int64)
        self._rows_each[: len(rows_beside)] += np.array(rows_beside, np.int64)
        self._waking_steps = _WAKING_STEPS if wakes_early else 0
        self.max_drafts = max_drafts
        self.min_acceptance = min_acceptance
        self.times = StepTimes()
        self._sizes: dict[int, _Costs] = {}
        # Time of the latest proposal; of all that was done for drafts since the latest step that was booked;
        # of the latest round or lookup; and whether the latest step had drafts.
        self._proposing_s = self._took_s = self._per_draft_s = 0.0
        self._had_drafts = False
        # Of the latest step: whether nobody looks behind it, and whether an attempt is near.
        self.is_resting = self.is_waking = False
        # Steps that pass next, of so many sequences each.
        self._num_passing = self._passing = 0
        self.owners = Owners()
        # Sequences in the latest step that was booked.
        self._latest_size = 0
        # Steps so far, and at the latest one whose tokens were looked at; how many plain ones it took; and
        # steps until everybody in it bears one that is longer.
        self._num_steps = self._latest_came = self._borne_in = 0
        self._pace = 1.0
        # Of the latest step: seconds of plain steps that accepted drafts stood for, and what drafts took.
        self._saved_s = self._spent_s = 0.0

    # What happened.

    def passes(self, num_sequences: int) -> bool:
        """Whether nothing at all is done behind a step of so many sequences, not even looked at the clock.
        Between two steps caches hold the model's weights, so whatever is touched costs.
        """
        if not self._num_passing or num_sequences != self._passing:
            return False
        self._num_passing -= 1
        return True

    def rests(self, num_sequences: int, seconds: float, *, is_plain: bool, has_drafts: bool) -> bool:
        """Whether nobody looks behind a step that does not pass, which is then booked here. `is_plain`: every
        sequence decoded, without drafts.
        """
        if self._num_passing:
            # The batch has another size meanwhile.
            self._costs(self._passing).num_resting += self._num_passing
            self._num_steps -= self._num_passing
            self._num_passing = 0
        costs = self._costs(num_sequences)
        self.is_resting, self.is_waking = costs.num_resting > 0, False
        if not self.is_resting or has_drafts:
            return False
        if is_plain and not self._had_drafts:
            self.times.add(num_sequences, 0, seconds)
            costs.steps_since_plain = 0
        self._had_drafts = False
        self._latest_size = num_sequences
        costs.num_resting -= 1
        self.is_waking = costs.num_resting < self._waking_steps
        self._passing = num_sequences
        self._num_passing = max(0, min(_PASSING_STEPS, costs.num_resting - self._waking_steps))
        costs.num_resting -= self._num_passing
        self._num_steps += 1 + self._num_passing
        return True

    def took(self, seconds: float) -> None:
        """Books what was done for drafts behind a step: what a drafter kept of it, all that was decided, and
        proposals.
        """
        self._took_s += seconds

    def stepped(self, step: StepCost) -> None:
        """Books what a step took."""
        self._saved_s = self._spent_s = 0.0
        had_drafts, self._had_drafts = self._had_drafts, step.num_drafts > 0
        proposing_s, deciding_s = self._proposing_s, max(0.0, self._took_s - self._proposing_s)
        self._proposing_s = self._took_s = 0.0
        self._latest_size = step.num_sequences
        self._num_steps, self._pace = self._num_steps + 1, 1.0
        costs = self._costs(step.num_sequences)
        plain_s = self.times.plain_s(step.num_sequences)
        expected_s = self._expected_s(step, plain_s)
        extra_s = self._extra_s(step, plain_s, expected_s) if plain_s else 0.0
        costs.looking.add(proposing_s + deciding_s)
        # Of deciding what takes longer than a step, and than it does mostly, was something else, too.
        if plain_s:
            deciding_s = min(deciding_s, max(plain_s, costs.looking.value))
        took_s = proposing_s + deciding_s
        self._spent_s = took_s + extra_s
        if step.decodes_only:
            if step.num_drafts:
                costs.steps_since_plain += 1
                if plain_s:
                    self.times.add(step.num_sequences, step.num_drafts, step.seconds)
            # The first one after drafts is put together as a whole, and takes longer.
            elif not had_drafts:
                self.times.add(step.num_sequences, 0, step.seconds)
                costs.steps_since_plain = 0
                if not plain_s:
                    costs.credit_s = _FIRST_CREDIT * step.seconds
        if not plain_s:
            return
        # What only this step was longer disturbed it.
        self._pace = 1 + (took_s + min(extra_s, expected_s)) / plain_s
        self._saved_s = plain_s * step.num_accepted / step.num_sequences
        gained_s = self._saved_s - self._spent_s
        if step.num_drafts and step.decodes_only:
            # What deciding took was not for these drafts to bear, but for whether anybody looks.
            self._settle(costs, (self._saved_s - extra_s - proposing_s) / plain_s)
        self._pay(costs, plain_s, gained_s, _TRIAL_SHARE * step.seconds)

    def came(self, sequences: Sequence[DraftProgress], owners: Sequence[str]) -> None:
        """Books whose tokens of the step were late. Steps behind which nobody looked were plain."""
        num_plain = self._num_steps - self._latest_came - 1
        self._latest_came = self._num_steps
        late: dict[str, list[float]] = {}
        for progress, owner in zip(sequences, owners, strict=True):
            if num_plain:
                progress.paces.extend([1.0] * min(num_plain, PACE_TOKENS))
            late.setdefault(owner, []).append(progress.lateness(self._pace))
        known = [(self.owners.of(owner), sum(each) / len(each)) for owner, each in late.items()]
        self._borne_in = max((owner.came(lateness, self._num_steps) for owner, lateness in known), default=0)

    def _extra_s(self, step: StepCost, plain_s: float, expected_s: float) -> float:
        """Seconds that a step was longer for its drafts."""
        if not step.num_drafts or not step.decodes_only:
            # Beside prompts what drafts take is not to be seen.
            return expected_s
        # Beyond the share of its rows it was something else, which befalls plain steps as well.
        most_s = plain_s * (1 + step.num_drafts / step.num_sequences)
        return min(max(0.0, step.seconds - plain_s), most_s)

    def _expected_s(self, step: StepCost, plain_s: float) -> float:
        """The same, as others with as many drafts were."""
        if not step.num_drafts or not plain_s:
            return 0.0
        alone = step.num_sequences == 1
        factors = self.times.factors_of_one if alone else partial(self.times.factors, step.num_sequences)
        return float(factors(step.num_drafts)[step.num_drafts] - 1) * plain_s

    def _pay(self, costs: _Costs, plain_s: float, gained_s: float, earned_s: float) -> None:
        """Settles a step with the purse; nobody looks any more once it is empty."""
        costs.credit_s = min(costs.credit_s + gained_s + earned_s, _MOST_CREDIT * plain_s)
        if gained_s > 0:
            costs.num_felt = 0
        elif -gained_s > SLACK * plain_s:
            costs.num_felt = min(costs.num_felt + 1, _MOST_FELT)
        costs.since_woken_s += gained_s
        # Looking takes as long in the next step.
        is_felt = self._borne_in > 0 and costs.looking.value > (NOT_LATE - 1) * plain_s
        if (costs.credit_s >= 0 and not is_felt) or costs.num_resting or not self.min_acceptance:
            return
        if costs.since_woken_s > 0:
            costs.num_woken = costs.num_unheard = 0
        wanted_s = _ATTEMPT_STEPS * costs.looking.value + costs.trial_s
        missing_s = max(0.0, min(wanted_s, _LARGEST_TRIAL * _MOST_CREDIT * plain_s) - costs.credit_s)
        earned_in = math.ceil(missing_s / (_TRIAL_SHARE * plain_s))
        costs.num_resting = max(earned_in, _REST_INTERVAL * costs.num_felt, self._borne_in)
        # What is earned meanwhile.
        costs.credit_s += missing_s
        costs.num_felt, self.is_resting = 0, True

    def drain(self) -> tuple[float, float]:
        """(seconds of plain steps that accepted drafts stood for, seconds that drafts took), of the step that
        was booked since the last call.
        """
        booked = self._saved_s, self._spent_s
        self._saved_s = self._spent_s = 0.0
        return booked

    @staticmethod
    def _settle(costs: _Costs, gained: float) -> None:
        """Compares a step with drafts, proposing included, with the plain steps that it stood for."""
        costs.balance = _BALANCE_FADING * costs.balance + gained
        if costs.balance < 0:
            costs.margin = min(costs.margin * _MARGIN_UP, _MOST_MARGIN)
        else:
            costs.margin = max(costs.margin * _MARGIN_DOWN, LEAST_MARGIN)

    def proposed(self, num_sequences: int, num_rounds: int, seconds: float, num_read: int = 0) -> None:
        """Books what proposing took: so many drafts one after another, or look-ups. `num_read` tokens were
        read before, beyond those that every round adds.
        """
        costs = self._costs(num_sequences)
        self._proposing_s = seconds
        if not num_read:
            self._per_draft_s = seconds / num_rounds
            costs.per_draft.add(self._per_draft_s)
            return
        drafting = num_rounds * costs.per_draft.value
        costs.per_read.add(max(0.0, seconds - drafting) / num_read)

    def look_back_s(self, num_tokens: int) -> float:
        """How long looking back at an answer of so many tokens may take: nothing where lookups say it
        themselves.
        """
        if not self._costs(self._latest_size).num_resting:
            return 0.0
        plain_s = self.times.plain_s(self._latest_size)
        return plain_s * min(_LOOK_BACK_SHARE * num_tokens / max(1, self._latest_size), _MOST_LOOK_BACK)

    def may_wake(self, owner: str, num_lookups: int, num_held: int) -> None:
        """Ends the rest of the latest size of batch where looking back at an owner's answer says that drafts
        pay: so many would have held. After a rest that was ended in vain twice as many answers end before the
        next one is.
        """
        costs, plain_s = self._costs(self._latest_size), self.times.plain_s(self._latest_size)
        if not num_lookups or not plain_s or not costs.num_resting:
            return
        extra_s = (self.times.factors(self._latest_size, self.max_drafts)[-1] - 1) * plain_s
        cost_s = self._latest_size * costs.margin * (extra_s + costs.looking.value)
        if num_held / num_lookups * plain_s < cost_s:
            return
        if costs.num_unheard:
            costs.num_unheard -= 1
            return
        costs.num_unheard = (1 << min(costs.num_woken, _MOST_UNHEARD)) - 1
        costs.num_woken += 1
        costs.since_woken_s = 0.0
        costs.num_resting = self._num_passing = 0
        self.owners.of(owner).expects_gain()
        costs.credit_s = max(costs.credit_s, _FIRST_CREDIT * plain_s)

    @staticmethod
    def extra_tokens(progress: DraftProgress) -> int:
        """Tokens to read before drafting, beyond those that every round adds."""
        return progress.num_unread if progress.num_unread > _FEW_TOKENS else 0

    # What is decided.

    def lookups(self, sequences: Sequence[DraftProgress], owners: Sequence[str]) -> list[int]:
        """How many drafts to look up for each: for those whose lookups are expected to be worth their time,
        and in turns for as many others as trials may.
        """
        num = len(sequences)
        if not self.min_acceptance:
            return [self.max_drafts] * num
        costs, plain_s = self._costs(num), self.times.plain_s(num)
        if not self._can_compare(costs, plain_s):
            return [0] * num
        each_s = costs.per_draft.value
        least = max(self.min_acceptance, costs.margin * each_s * num / plain_s)
        chances = [self._chance(*each) for each in zip(sequences, owners, strict=True)]
        in_vain = costs.worth_s < -_MOST_IN_VAIN * plain_s
        asked = [] if in_vain else [row for row, chance in enumerate(chances) if chance >= least]
        few = max(1, int(SLACK * plain_s / each_s)) if each_s else num
        if len(asked) > few:
            sure = [(each.found or 0.0) * each.acceptance.share(0, _PRIOR) for each in sequences]
            if self._borne_in or not all_gain(owners, sure, len(asked) * each_s / plain_s):
                asked = [asked[(costs.turn + offset) % len(asked)] for offset in range(few)]
                costs.turn += few
        others = sorted(set(range(num)) - set(asked))
        if others and len(asked) < few and self._may_try(costs, plain_s, each_s):
            # As many as together are a short trial.
            count = min(few - len(asked), len(others))
            tried = [others[(costs.turn + offset) % len(others)] for offset in range(count)]
            costs.turn += len(tried)
            asked += tried
        counts = [0] * num
        for row in asked:
            counts[row] = self.max_drafts
        return counts

    def rounds(
        self, sequences: Sequence[DraftProgress], owners: Sequence[str], most: Sequence[int]
    ) -> list[int]:
        """How many drafts each gets, up to `most` [S], of those that are made by forwards: as many as pay; or
        in a trial one for all that need not be read first, and a few for one alone.
        """
        num = len(sequences)
        if not self.min_acceptance:
            return list(most)
        costs, plain_s = self._costs(num), self.times.plain_s(num)
        if not self._can_compare(costs, plain_s):
            return [0] * num
        counts, _ = self._best(sequences, owners, most, by_forwards=True)
        asked = [row for row in range(num) if most[row]]
        if any(counts) or not asked:
            return counts
        tried = [row for row in asked if not self.extra_tokens(sequences[row])]
        tried = tried or [min(asked, key=lambda row: sequences[row].num_unread)]
        few = min(_TRIAL_ROUNDS, self.max_drafts) if len(tried) == 1 else 1
        trial_s = few * costs.per_draft.value + self.extra_tokens(sequences[tried[0]]) * costs.per_read.value
        num_rows = len(tried) * int(self._rows_each[:few].sum())
        if num_rows > few:
            trial_s += float(self.times.factors(num, num_rows)[-1] - 1) * plain_s
        if self._may_try(costs, plain_s, trial_s):
            for row in tried:
                counts[row] = few
        return counts

    def verifiable(
        self, sequences: Sequence[DraftProgress], owners: Sequence[str], lengths: Sequence[int]
    ) -> list[int]:
        """How many of the drafts that were found for each [S] are verified."""
        if not self.min_acceptance:
            return list(lengths)
        counts, gained_s = self._best(sequences, owners, lengths, by_forwards=False)
        costs = self._costs(len(sequences))
        if any(lengths):
            # Where lookups find what is never worth its rows, they cost time in vain.
            costs.worth_s = _BALANCE_FADING * costs.worth_s + gained_s - self._proposing_s
        return counts

    def _can_compare(self, costs: _Costs, plain_s: float) -> bool:
        return plain_s > 0 and costs.steps_since_plain < _REFRESH_STEPS

    def _may_try(self, costs: _Costs, plain_s: float, seconds: float) -> bool:
        """Whether a trial that takes so long has been earned, and is borne. One that takes more than can be
        earned is paid for afterwards, so that what was dear once is measured again.
        """
        costs.trial_s = min(seconds, _LARGEST_TRIAL * _MOST_CREDIT * plain_s)
        return costs.credit_s >= costs.trial_s and (not self._borne_in or seconds <= (NOT_LATE - 1) * plain_s)

    def _chance(self, progress: DraftProgress, owner: str) -> float:
        known = self.owners.of(owner)
        found = known.found if progress.found is None else progress.found
        return found * progress.acceptance.share(0, _PRIOR, known.acceptance)

    def _best(
        self,
        sequences: Sequence[DraftProgress],
        owners: Sequence[str],
        lengths: Sequence[int],
        *,
        by_forwards: bool,
    ) -> tuple[list[int], float]:
        """The drafts with which the step yields most, as counts [S], and the seconds that they are expected
        to gain.
        """
        num, most = len(sequences), max(lengths)
        if not most or not self.times.plain_s(num):
            return [0] * num, 0.0
        if num == 1:
            return self._best_of_one(sequences[0], owners[0], most, by_forwards=by_forwards)
        return self._best_of_many(sequences, owners, lengths, by_forwards=by_forwards)

    def _best_of_many(
        self,
        sequences: Sequence[DraftProgress],
        owners: Sequence[str],
        lengths: Sequence[int],
        *,
        by_forwards: bool,
    ) -> tuple[list[int], float]:
        """The same of sequences that share a step."""
        num, most = len(sequences), max(lengths)
        costs, plain_s = self._costs(num), self.times.plain_s(num)
        priors = [self.owners.of(owner).acceptance for owner in owners]
        reach = np.cumprod(self._shares(sequences, priors, lengths, most), axis=1)  # [S, P]
        # Likeliest first; of one sequence these are in their order.
        order = np.argsort(-reach, axis=None, kind="stable")[: np.count_nonzero(reach)]
        if not order.size:
            return [0] * num, 0.0
        tokens = reach.ravel()[order]  # [N]
        whose, places = np.divmod(order, most)
        rows = np.cumsum(np.take(self._rows_each, places, mode="clip"))
        extra_s: NDArray[np.float64] = (self.times.factors(num, int(rows[-1]))[rows] - 1) * plain_s
        if by_forwards:
            extra_s = extra_s + self._forwards_s(costs, sequences, whose, places)
        sums = np.cumsum(tokens)
        yields = (num + sums) * plain_s / (plain_s + costs.margin * extra_s)
        # Lookups are over, and cost what they cost; but everybody waited for them.
        sure = np.cumprod(self._shares(sequences, [None] * num, lengths, most), axis=1).ravel()[order]
        factors = 1 + (extra_s + self._proposing_s) / plain_s
        fair = leaves_each_as_much(owners, whose, sure, factors)
        if self._borne_in:
            fair &= factors <= NOT_LATE
        best = int(np.argmax(np.where(fair, yields, 0.0)))
        gained_s = float(sums[best] * plain_s / num - extra_s[best])
        if yields[best] <= num or not fair[best]:
            best, gained_s = self._trial(costs, plain_s, num, tokens, extra_s), 0.0
        return np.bincount(whose[: best + 1], minlength=num).tolist(), gained_s

    def _best_of_one(
        self, progress: DraftProgress, owner: str, most: int, *, by_forwards: bool
    ) -> tuple[list[int], float]:
        """The same of a sequence alone, whose steps are the shortest: without arrays it takes a tenth."""
        costs, plain_s, prior = self._costs(1), self.times.plain_s(1), self.owners.of(owner).acceptance
        each_s = costs.per_draft.value if by_forwards else 0.0
        reading_s = self.extra_tokens(progress) * costs.per_read.value / _READ_ROUNDS if by_forwards else 0.0
        rows = np.cumsum(np.take(self._rows_each, range(most), mode="clip")).tolist()
        factors = self.times.factors_of_one(rows[-1])
        reach, total, best, highest, gained_s = 1.0, 0.0, 0, 1.0, 0.0
        tokens: list[float] = []
        extra_s: list[float] = []
        for place in range(most):
            share = progress.acceptance.share(place, _PRIOR, prior)
            if not share or (not place and share < self.min_acceptance):
                break
            reach *= share
            total += reach
            tokens.append(reach)
            extra_s.append((factors[rows[place]] - 1) * plain_s + (place + 1) * each_s + reading_s)
            yields = (1 + total) * plain_s / (plain_s + costs.margin * extra_s[-1])
            if yields > highest and (not self._borne_in or extra_s[-1] <= (NOT_LATE - 1) * plain_s):
                best, highest, gained_s = place + 1, yields, total * plain_s - extra_s[-1]
        if not best and tokens:
            best = 1 + self._trial(costs, plain_s, 1, np.array(tokens), np.array(extra_s))
        return [best], gained_s

    def _shares(
        self,
        sequences: Sequence[DraftProgress],
        priors: Sequence[Acceptance | None],
        lengths: Sequence[int],
        most: int,
    ) -> NDArray[np.float64]:
        """Probability that each draft holds if those before it do [S, P]; 0 where there is none."""
        shares = np.zeros((len(sequences), most))
        for row, (progress, prior, length) in enumerate(zip(sequences, priors, lengths, strict=True)):
            found = [progress.acceptance.share(place, _PRIOR, prior) for place in range(length)]
            if found and found[0] >= self.min_acceptance:
                shares[row, :length] = found
        return shares

    def _forwards_s(
        self,
        costs: _Costs,
        sequences: Sequence[DraftProgress],
        whose: NDArray[np.int64],
        places: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """Seconds of the forwards that make the first so many drafts [N]: one for each place, and what is
        read before them.
        """
        unread = np.array([self.extra_tokens(each) for each in sequences])
        reading = np.cumsum(np.where(places == 0, unread[whose], 0))
        rounds = np.maximum.accumulate(places) + 1
        return rounds * costs.per_draft.value + reading * costs.per_read.value / _READ_ROUNDS

    def _trial(
        self,
        costs: _Costs,
        plain_s: float,
        num: int,
        tokens: NDArray[np.floating[Any]],
        extra_s: NDArray[np.floating[Any]],
    ) -> int:
        """The last of some drafts that would pay if they cost nothing, which are verified to measure what
        they cost; -1 for none.
        """
        most = max(num, 2 * self.times.num_known(num))
        count = min(num << costs.num_trials // FEW % 4, most, tokens.size)
        seconds = float(extra_s[count - 1])
        if tokens[:count].sum() < num * SLACK or not self._may_try(costs, plain_s, seconds):
            return -1
        costs.num_trials += 1
        return count - 1

    def _costs(self, num_sequences: int) -> _Costs:
        size = size_class(num_sequences)
        if size not in self._sizes:
            self._sizes[size] = _Costs()
            if self._per_draft_s:
                # Until it is measured, what another size took.
                self._sizes[size].per_draft.add(self._per_draft_s)
        return self._sizes[size]
