"""Decides what is proposed for each sequence's next step.

Tokens that a grammar forces come first (jump-forward: a JSON key is verified in one step, not sampled in
ten); then, where speculation is on and pays, prompt lookup or the draft model. All are verified alike, so
none of them can change what is generated.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine.config import SpeculationConfig
from engine.runner.sequence_table import SequenceState, SequenceTable
from engine.runner.speculation.draft_model import DraftModel
from engine.runner.speculation.economics import Economics, StepCost
from engine.runner.speculation.ngram import continuation

# Forced tokens that are verified in one step.
MAX_FORCED_TOKENS = 32


class Proposer:
    """Proposals for the sequences that sampled in a step."""

    def __init__(self, config: SpeculationConfig, draft_model: DraftModel | None = None) -> None:
        self.config = config
        self.draft_model = draft_model
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
        if self.config.method == "off":
            return proposals
        self.economics.stepped(step)
        # A beam goes on as another sequence.
        indices = [
            index
            for index, state in enumerate(states)
            if not proposals[index] and not state.sampling.beam_width
        ]
        chosen = [states[index] for index in indices]
        for state in chosen:
            state.draft.num_unread = int(table.num_tokens[state.slot]) - state.draft.num_read
        counts = self.economics.drafts([state.draft for state in chosen], looks_up=self.draft_model is None)
        if any(counts):
            found = self._speculate(chosen, counts, [num_in_flight[index] for index in indices], table)
            for index, drafts in zip(indices, found, strict=True):
                proposals[index] = drafts
        return proposals

    def judge(self, state: SequenceState, num_drafted: int, num_accepted: int) -> None:
        """Takes in how a sequence's drafts fared; forced tokens say nothing of speculation."""
        if num_drafted and not state.draft.forced:
            self.economics.verified(state.draft, num_drafted, num_accepted)

    def _speculate(
        self, states: list[SequenceState], counts: list[int], ahead: list[int], table: SequenceTable
    ) -> list[tuple[int, ...]]:
        num_read = 0
        started = time.monotonic()
        found: list[tuple[int, ...]] = [()] * len(states)
        wanted = [index for index, count in enumerate(counts) if count]
        if self.draft_model is None:
            for index in wanted:
                found[index] = self._look_up(states[index], table, counts[index] + ahead[index])
            num_rounds = len(wanted)
        else:
            num_rounds = max(counts)
            num_read = sum(Economics.extra_tokens(states[index].draft) for index in wanted)
            drafts = self.draft_model.propose(
                [states[index] for index in wanted], [counts[index] for index in wanted], table
            )
            for index, tokens in zip(wanted, drafts, strict=True):
                found[index] = tokens
        self.economics.proposed(len(states), num_rounds, time.monotonic() - started, num_read)
        return found

    @staticmethod
    def _forced(state: SequenceState) -> tuple[int, ...]:
        if state.matcher is None:
            return ()
        return tuple(state.matcher.forced()[:MAX_FORCED_TOKENS])

    def _look_up(self, state: SequenceState, table: SequenceTable, count: int) -> tuple[int, ...]:
        tokens = table.tokens[state.slot, : int(table.num_tokens[state.slot])]
        drafts = continuation(
            tokens, longest=self.config.max_ngram, shortest=self.config.min_ngram, num_drafts=count
        )
        if state.matcher is not None and drafts:
            drafts = drafts[: state.matcher.valid_prefix(drafts)]
        state.draft.num_lookups += 1
        state.draft.num_found += bool(drafts)
        return drafts
