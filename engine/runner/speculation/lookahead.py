"""Drafts from n-grams that the model made on the way of Jacobi iterations (lookahead decoding; see
ngram_pool).

A sequence that looks ahead computes its window beside its own rows in each step, as branches, and verifies
what its pool has behind its last token: one n-gram as its drafts, and others as branches. Nothing is loaded
and nothing trained. What is in a pool also comes from the sequence's own text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.model.lookahead import LookaheadShape
from engine.runner.inputs import StepInputs
from engine.runner.sequence_table import SequenceState, SequenceTable
from engine.runner.speculation.branches import DraftBranch
from engine.runner.speculation.drafter import Drafter
from engine.runner.speculation.ngram_pool import LookaheadText


class LookaheadDrafter(Drafter):
    """See Drafter."""

    looks_up = False

    def __init__(self, shape: LookaheadShape) -> None:
        self._shape = shape
        self.rows_beside = (shape.num_rows,)

    def propose(
        self, states: Sequence[SequenceState], counts: Sequence[int], table: SequenceTable
    ) -> list[tuple[int, ...]]:
        """See Drafter; and branches, which become part of the sequences' next step."""
        return [self._ahead(state, count, table) for state, count in zip(states, counts, strict=True)]

    def num_unread(self, state: SequenceState, table: SequenceTable) -> int:
        """See Drafter: no more sequences than there are scratch blocks for, and none that forgets."""
        return int(state.slot < self._shape.num_sequences and state.kept is None)

    def saw(self, inputs: StepInputs, table: SequenceTable) -> None:
        """See Drafter."""
        rows = inputs.branches
        if rows is None:
            return
        behind: dict[int, list[int]] = {}
        guesses = [
            member for member, each in zip(rows.members, rows.branches, strict=True) if not each.is_draft
        ]
        for member, token in zip(guesses, rows.guessed, strict=True):
            behind.setdefault(member, []).append(token)
        for member, (last, *others) in behind.items():
            state = inputs.states[member]
            if state.draft.lookahead is not None:
                # The first branch ends with the last column.
                state.draft.lookahead.computed([*others, last], int(table.num_tokens[state.slot]))

    def _ahead(self, state: SequenceState, count: int, table: SequenceTable) -> tuple[int, ...]:
        ahead, shape = state.draft.lookahead, self._shape
        if ahead is None:
            ahead = state.draft.lookahead = LookaheadText(
                num_levels=shape.num_levels, num_columns=shape.num_columns, most_each=shape.num_candidates
            )
        text = table.tokens[state.slot, : int(table.num_tokens[state.slot])]
        ahead.read(text)
        # Of n-grams that are the same so far, one.
        found = list(dict.fromkeys(each[:count] for each in ahead.pool.after(int(text[-1]))))
        if state.matcher is not None:
            # Branches have no masks.
            held = [each[: state.matcher.valid_prefix(each)] for each in found]
            found = [max(held, key=len)] if held else []
        others = [DraftBranch(tokens=each, is_draft=True) for each in found[1:]]
        state.draft.branches = (*window_branches(ahead.window(text)), *others)
        return found[0] if found else ()


def window_branches(window: NDArray[np.int64]) -> list[DraftBranch]:
    """The first level of a window [L, W] with its last column, and the other columns, which leave that level
    behind their first token.
    """
    columns = window.T.tolist()
    level = tuple(column[0] for column in columns)
    branches = [DraftBranch(tokens=(*level, *columns[-1][1:]))]
    for index, column in enumerate(columns[:-1]):
        branches.append(DraftBranch(tokens=tuple(column[1:]), parent=0, num_shared=index + 1))
    return branches
