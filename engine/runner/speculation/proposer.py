"""Decides what is proposed for each sequence's next step.

Tokens that a grammar forces come first (jump-forward: a JSON key is verified in one step, not sampled in
ten); then, where speculation is on and pays, what its drafter says. All are verified alike, so none of them
can change what is generated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from engine.config import SpeculationConfig
from engine.runner.sequence_table import SequenceState, SequenceTable
from engine.runner.speculation.drafter import Drafter
from engine.runner.speculation.economics import Economics, StepCost
from engine.runner.speculation.lookups import AnswerLookup, PromptLookup

# Forced tokens that are verified in one step.
MAX_FORCED_TOKENS = 32
# Part of a step's time that a drafter may take to learn.
_LEARNING_SHARE = 0.005
# Drafters that nothing has to be loaded for, by the method's name.
_LOOKUPS: dict[str, Callable[[SpeculationConfig], Drafter]] = {"ngram": PromptLookup, "suffix": AnswerLookup}


class Proposer:
    """Proposals for the sequences that sampled in a step."""

    def __init__(self, config: SpeculationConfig, drafter: Drafter | None = None) -> None:
        """`drafter` is what has to be loaded for the method."""
        self.config = config
        if drafter is None and config.method in _LOOKUPS:
            drafter = _LOOKUPS[config.method](config)
        self.drafter = drafter
        self.economics = Economics(config.num_draft_tokens, config.min_acceptance)

    def propose(
        self,
        states: list[SequenceState],
        table: SequenceTable,
        step: StepCost,
        num_in_flight: Sequence[int],
    ) -> list[tuple[int, ...]]:
        """Drafts after each sequence's last token; `step` is the one that has just been sampled.

        Where another one is under way, it draws up to `num_in_flight` [S] of these tokens itself: so many
        more are proposed, and who plans leaves the first ones out. Whether they come so shows in the drafts.
        """
        proposals = [self._forced(state) for state in states]
        for state, forced in zip(states, proposals, strict=True):
            state.draft.forced = bool(forced)
        drafter = self.drafter
        if drafter is None:
            return proposals
        self.economics.stepped(step)
        drafter.learn(_LEARNING_SHARE * step.seconds)
        # A beam goes on as another sequence.
        indices = [
            index
            for index, state in enumerate(states)
            if not proposals[index] and not state.sampling.beam_width
        ]
        chosen = [states[index] for index in indices]
        for state in chosen:
            state.draft.num_unread = int(table.num_tokens[state.slot]) - state.draft.num_read
        counts = self.economics.drafts([state.draft for state in chosen], looks_up=drafter.looks_up)
        if any(counts):
            found = self._speculate(
                drafter, chosen, counts, [num_in_flight[index] for index in indices], table
            )
            for index, drafts in zip(indices, found, strict=True):
                proposals[index] = drafts
        return proposals

    def judge(self, state: SequenceState, num_drafted: int, num_accepted: int) -> None:
        """Takes in how a sequence's drafts fared; forced tokens say nothing of speculation."""
        if num_drafted and not state.draft.forced:
            self.economics.verified(state.draft, num_drafted, num_accepted)

    def ended(self, state: SequenceState, table: SequenceTable) -> None:
        """A sequence is about to leave the table."""
        # Beams are guesses at one answer, and what failed is none.
        if self.drafter is not None and not state.failure and not state.sampling.beam_width:
            end = int(table.num_tokens[state.slot])
            self.drafter.ended(state, table.tokens[state.slot, state.num_prompt : end])

    def _speculate(
        self,
        drafter: Drafter,
        states: list[SequenceState],
        counts: list[int],
        ahead: list[int],
        table: SequenceTable,
    ) -> list[tuple[int, ...]]:
        started = time.monotonic()
        found: list[tuple[int, ...]] = [()] * len(states)
        wanted = [index for index, count in enumerate(counts) if count]
        asked = [states[index] for index in wanted]
        if drafter.looks_up:
            num_rounds, num_read = len(wanted), 0
            drafts = drafter.propose(asked, [counts[index] + ahead[index] for index in wanted], table)
            drafts = [_looked_up(*each) for each in zip(asked, drafts, strict=True)]
        else:
            num_rounds = max(counts)
            num_read = sum(Economics.extra_tokens(state.draft) for state in asked)
            drafts = drafter.propose(asked, [counts[index] for index in wanted], table)
        for index, tokens in zip(wanted, drafts, strict=True):
            found[index] = tokens
        self.economics.proposed(len(states), num_rounds, time.monotonic() - started, num_read)
        return found

    @staticmethod
    def _forced(state: SequenceState) -> tuple[int, ...]:
        if state.matcher is None:
            return ()
        return tuple(state.matcher.forced()[:MAX_FORCED_TOKENS])


def _looked_up(state: SequenceState, drafts: tuple[int, ...]) -> tuple[int, ...]:
    """What the sequence's grammar takes of what was found, with the books of finding."""
    if state.matcher is not None and drafts:
        drafts = drafts[: state.matcher.valid_prefix(drafts)]
    state.draft.num_lookups += 1
    state.draft.num_found += bool(drafts)
    return drafts
