"""What is known of a sequence's drafts from step to step: the proposer's own, kept with the sequence."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from engine.runner.speculation.acceptance import Acceptance
from engine.runner.speculation.answers import AnswerMatch
from engine.runner.speculation.branches import DraftBranch
from engine.runner.speculation.ngram_pool import LookaheadText

# How fast the experience with one sequence fades.
_OWN_FADING = 0.9
# Tokens over which a text's pace counts, because those that come together are read one after another.
PACE_TOKENS = 8
# Tokens that took no more than so many plain steps each are not late.
NOT_LATE = 1.02


@dataclass(kw_only=True)
class DraftProgress:
    """How its drafts fared, and how far the draft model has read."""

    acceptance: Acceptance = field(default_factory=lambda: Acceptance(_OWN_FADING))
    # Share of lookups that found something; None before the first.
    found: float | None = None
    # The latest proposal was forced by the grammar, and says nothing of speculation.
    forced: bool = False
    # How long after the one before it each of the latest tokens came, in plain steps; and how many drafts of
    # the latest step held.
    paces: deque[float] = field(default_factory=lambda: deque([1.0] * PACE_TOKENS, PACE_TOKENS))
    num_held: int = 0
    # Drafts that were not verified, and how many tokens were known when they were made.
    unverified: tuple[int, ...] = ()
    num_known_then: int = 0
    # Leading tokens whose keys and values the draft model has under the sequence's own blocks.
    num_read: int = 0
    # Leading tokens behind which it has a state, where its layers carry one.
    num_in_state: int = 0
    # Tokens that it, or a head, would have to read first.
    num_unread: int = 0
    # Tokens that were known when the latest drafts were made, and the position up to which blocks were its
    # own.
    num_known: int = 0
    num_owned: int = 0
    num_proposed: int = 0
    # Where its text stands in its owner's recent answers.
    match: AnswerMatch | None = None
    # What lookahead knows of its text, and what its next step computes beside its drafts.
    lookahead: LookaheadText | None = None
    branches: tuple[DraftBranch, ...] = ()

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """Takes in how the latest drafts fared."""
        self.acceptance.saw(num_drafted, num_accepted)
        self.num_held = num_accepted
        # The draft model has read every draft but its last; what lies in scratch blocks is lost.
        read = self.num_known + min(num_accepted, self.num_proposed - 1)
        self.num_read = max(self.num_read, min(read, self.num_owned))

    def lateness(self, pace: float) -> float:
        """Takes in the latest step, of so many plain ones: 1 where its tokens are late, which they are where
        the latest few took longer than plain steps do, and the step as well; below 0 by the part that they
        took less.
        """
        self.paces.append(pace)
        self.paces.extend([0.0] * self.num_held)
        self.num_held = 0
        took = sum(self.paces) / PACE_TOKENS
        return 1.0 if took > (NOT_LATE if pace <= NOT_LATE else 1.0) else min(0.0, took - 1.0)
