"""Drafters that look texts up: in themselves, and in what their tenant was answered lately."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.runner.sequence_table import SequenceState, SequenceTable
from engine.runner.speculation.answers import RecentAnswers
from engine.runner.speculation.drafter import Drafter
from engine.runner.speculation.ngram import continuation
from engine.speculation_config import SpeculationConfig


class PromptLookup(Drafter):
    """See Drafter. Each sequence is searched for its own end."""

    looks_up = True

    def __init__(self, config: SpeculationConfig) -> None:
        self._longest, self._shortest = config.max_ngram, config.min_ngram

    def propose(
        self, states: Sequence[SequenceState], counts: Sequence[int], table: SequenceTable
    ) -> list[tuple[int, ...]]:
        """See Drafter."""
        return [
            self.continued(table.tokens[state.slot, : int(table.num_tokens[state.slot])], count)
            for state, count in zip(states, counts, strict=True)
        ]

    def drafts_after(self, state: SequenceState, text: NDArray[np.int64], count: int) -> tuple[int, ...]:
        """See Drafter."""
        return self.continued(text, count)

    def continued(self, text: NDArray[np.int64], count: int) -> tuple[int, ...]:
        """Up to `count` tokens after a text [L]."""
        return continuation(text, longest=self._longest, shortest=self._shortest, num_drafts=count)


class AnswerLookup(Drafter):
    """See Drafter. A long passage is looked up in the owner's answers, then in the sequence's own text, then
    a short one in the answers.
    """

    looks_up = True

    def __init__(self, config: SpeculationConfig) -> None:
        self._own = PromptLookup(config)
        self._longest, self._shortest = config.max_ngram, config.min_ngram
        self.answers = RecentAnswers(config.answer_tokens)

    def propose(
        self, states: Sequence[SequenceState], counts: Sequence[int], table: SequenceTable
    ) -> list[tuple[int, ...]]:
        """See Drafter."""
        return [
            self.drafts_after(state, table.tokens[state.slot, : int(table.num_tokens[state.slot])], count)
            for state, count in zip(states, counts, strict=True)
        ]

    def drafts_after(self, state: SequenceState, text: NDArray[np.int64], count: int) -> tuple[int, ...]:
        """See Drafter."""
        state.draft.match, length, found = self.answers.continuation(
            state.owner, state.draft.match, text, count
        )
        if found and length >= self._longest:
            return found
        own = self._own.continued(text, count)
        return own or (found if length >= self._shortest else ())

    def ended(self, state: SequenceState, output: NDArray[np.int64]) -> None:
        """See Drafter."""
        self.answers.add(state.owner, output)

    def learn(self, seconds: float) -> None:
        """See Drafter."""
        self.answers.learn(seconds)
