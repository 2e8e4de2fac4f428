"""Decides what is proposed for each sequence's next step.

Tokens that a grammar forces come first (jump-forward: a JSON key is verified in one step, not sampled in
ten); then, where speculation is on and pays, what its drafter says. All are verified alike, so none of them
can change what is generated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.runner.inputs import StepInputs
from engine.runner.sequence_table import SequenceState, SequenceTable
from engine.runner.speculation.drafter import Drafter
from engine.runner.speculation.economics import Economics, StepCost
from engine.runner.speculation.lookups import AnswerLookup, PromptLookup
from engine.speculation_config import SpeculationConfig
from engine.types import GRAMMAR_DRAFTS

# Forced tokens that are verified in one step.
MAX_FORCED_TOKENS = 32
# Where looking back begins in an answer moves on by so much of it each time: the golden ratio's part.
_TURN = 0.618
# Part of a step's time that a drafter may take to learn.
_LEARNING_SHARE = 0.005
# Drafters that nothing has to be loaded for, by the method's name.
_LOOKUPS: dict[str, Callable[[SpeculationConfig], Drafter]] = {"ngram": PromptLookup, "suffix": AnswerLookup}


class Proposer:
    """Proposals for the sequences that sampled in a step."""

    def __init__(
        self,
        config: SpeculationConfig,
        drafter: Drafter | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`drafter` is what has to be loaded for the method."""
        self._clock = clock
        self.config = config
        if drafter is None and config.method in _LOOKUPS:
            drafter = _LOOKUPS[config.method](config)
        self.drafter = drafter
        self._turn = 0.0
        self.economics = Economics(
            config.num_draft_tokens,
            config.min_acceptance,
            wakes_early=drafter is not None and drafter.keeps_steps,
            rows_beside=() if drafter is None else drafter.rows_beside,
        )

    def propose(
        self,
        states: list[SequenceState],
        table: SequenceTable,
        step: StepCost | None,
        num_in_flight: Sequence[int],
    ) -> list[tuple[int, ...]]:
        """Drafts after each sequence's last token; `step` is the one that has just been sampled, None where
        nothing but forced tokens is asked for.

        Where another one is under way, it draws up to `num_in_flight` [S] of these tokens itself: so many
        more are proposed, and who plans leaves the first ones out. Whether they come so shows in the drafts.
        """
        proposals = [self._forced(state) for state in states]
        for state, forced in zip(states, proposals, strict=True):
            state.draft.forced = bool(forced)
        drafter = self.drafter
        if drafter is None or step is None:
            return proposals
        self.economics.stepped(step)
        self.economics.came([state.draft for state in states], [state.owner[0] for state in states])
        if self.economics.is_resting:
            return proposals
        drafter.learn(_LEARNING_SHARE * step.seconds)
        # A beam goes on as another sequence.
        open_to = [
            not forced and not state.sampling.beam_width
            for state, forced in zip(states, proposals, strict=True)
        ]
        found = self._looked_up if drafter.looks_up else self._forwarded
        for index, drafts in enumerate(found(drafter, states, open_to, num_in_flight, table)):
            proposals[index] = proposals[index] or drafts
        return proposals

    def drafter_of(self, state: SequenceState) -> str:
        """Who proposed a sequence's latest drafts."""
        return GRAMMAR_DRAFTS if state.draft.forced else self.config.method

    def saw(self, inputs: StepInputs, table: SequenceTable) -> None:
        """A step was concluded."""
        if self.drafter is not None:
            self.drafter.saw(inputs, table)

    def judge(
        self, state: SequenceState, num_drafted: int, num_accepted: int, *, has_branches: bool = False
    ) -> None:
        """Takes in how a sequence's drafts fared; forced tokens say nothing of speculation. Branches cost the
        same where no draft was found, which is as good as one that did not hold.
        """
        if has_branches:
            num_drafted = max(num_drafted, 1)
        if num_drafted and not state.draft.forced:
            self.economics.owners.verified(state.draft, state.owner[0], num_drafted, num_accepted)

    def ended(self, state: SequenceState, table: SequenceTable) -> None:
        """A sequence is about to leave the table."""
        drafter = self.drafter
        # Beams are guesses at one answer, what failed is none, and of what left its prompt a part is gone.
        if drafter is None or state.failure or state.sampling.beam_width or state.num_prompt < 0:
            return
        text = table.tokens[state.slot, : int(table.num_tokens[state.slot])]
        seconds = self.economics.look_back_s(text.size - state.num_prompt)
        if seconds and drafter.looks_up:
            self._look_back(drafter, state, text, seconds)
        drafter.ended(state, text[state.num_prompt :])
        drafter.learn(2 * seconds)

    def _look_back(
        self, drafter: Drafter, state: SequenceState, text: NDArray[np.int64], seconds: float
    ) -> None:
        """Finds out what lookups would have brought in a text [L] that is known meanwhile: many at a time,
        with all that they need in the processor's caches, which a step between two of them empties.
        """
        self._turn = (self._turn + _TURN) % 1.0
        known = state.num_prompt + 1 + int(self._turn * (text.size - state.num_prompt))
        state.draft.match = None
        experience = self.economics.owners.of(state.owner[0])
        until, num_lookups, num_held = self._clock() + seconds, 0, 0
        while known < text.size and self._clock() < until:
            drafts = drafter.drafts_after(state, text[:known], self.config.num_draft_tokens)
            drawn = text[known : known + len(drafts)].tolist()
            held = experience.looked_back(drafts, drawn)
            known += 1 + held
            num_lookups, num_held = num_lookups + 1, num_held + held
        self.economics.may_wake(state.owner[0], num_lookups, num_held)

    def _looked_up(
        self,
        drafter: Drafter,
        states: list[SequenceState],
        open_to: list[bool],
        ahead: Sequence[int],
        table: SequenceTable,
    ) -> list[tuple[int, ...]]:
        """What was found and pays; what does not pay is compared with what is drawn."""
        economics = self.economics
        progress, owners = [state.draft for state in states], [state.owner[0] for state in states]
        for state in states:
            if state.draft.unverified:
                text = table.tokens[state.slot, : int(table.num_tokens[state.slot])]
                economics.owners.compared(state.draft, state.owner[0], text)
        lookups = zip(economics.lookups(progress, owners), open_to, ahead, strict=True)
        counts = [count + further if count and is_open else 0 for count, is_open, further in lookups]
        if not any(counts):
            return [()] * len(states)
        started = self._clock()
        found = _asked(drafter, states, counts, table)
        for index, state in enumerate(states):
            if counts[index]:
                matcher, tokens = state.matcher, found[index]
                found[index] = tokens if matcher is None else tokens[: matcher.valid_prefix(tokens)]
                economics.owners.looked_up(state.draft, owners[index], found=bool(found[index]))
        economics.proposed(len(states), sum(map(bool, counts)), self._clock() - started)
        lengths = [max(0, len(tokens) - ahead[index]) for index, tokens in enumerate(found)]
        for index, count in enumerate(economics.verifiable(progress, owners, lengths)):
            state, tokens = states[index], found[index]
            if tokens and not count and not state.draft.unverified:
                state.draft.unverified = tokens
                state.draft.num_known_then = int(table.num_tokens[state.slot])
            found[index] = tokens[: ahead[index] + count] if count else ()
        return found

    def _forwarded(
        self,
        drafter: Drafter,
        states: list[SequenceState],
        open_to: list[bool],
        ahead: Sequence[int],
        table: SequenceTable,
    ) -> list[tuple[int, ...]]:
        """What forwards make for those for whom they pay."""
        progress = [state.draft for state in states]
        for state in states:
            state.draft.num_unread = drafter.num_unread(state, table)
        most = [
            self.config.num_draft_tokens if each and state.draft.num_unread else 0
            for each, state in zip(open_to, states, strict=True)
        ]
        counts = self.economics.rounds(progress, [state.owner[0] for state in states], most)
        if not any(counts):
            return [()] * len(states)
        started = self._clock()
        unread = zip(progress, counts, strict=True)
        num_read = sum(Economics.extra_tokens(each) for each, count in unread if count)
        found = _asked(drafter, states, counts, table)
        self.economics.proposed(len(states), max(counts), self._clock() - started, num_read)
        return found

    @staticmethod
    def _forced(state: SequenceState) -> tuple[int, ...]:
        if state.matcher is None:
            return ()
        return tuple(state.matcher.forced()[:MAX_FORCED_TOKENS])


def _asked(
    drafter: Drafter, states: Sequence[SequenceState], counts: Sequence[int], table: SequenceTable
) -> list[tuple[int, ...]]:
    """Up to `counts` [S] drafts of each sequence; who wants none is not asked about."""
    wanted = [index for index, count in enumerate(counts) if count]
    drafts = drafter.propose([states[each] for each in wanted], [counts[each] for each in wanted], table)
    found: list[tuple[int, ...]] = [()] * len(states)
    for index, tokens in zip(wanted, drafts, strict=True):
        found[index] = tokens
    return found
