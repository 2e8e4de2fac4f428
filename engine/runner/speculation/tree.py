"""Drafts beside the likeliest ones, while these are made (see running_ahead): a tree of a fixed shape.

Where branches leave drafts, what was drawn is left out and drawn again with the same noise: so the second
token is what would have been drawn, had the first one been impossible. A branch of more than one draft is
one more row of the forwards that follow.

Branches have no masks and share whole blocks: a sequence under a grammar, and one that forgets, has a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.model.draft_tree import LIKELIEST, DraftTree
from engine.model.spec import NEVER_DRAWN
from engine.runner.sequence_table import SequenceState
from engine.runner.speculation.branches import DRAFTS, DraftBranch

# Draws from logits [R, V] behind rows [R].
DrawBehind = Callable[[Any, NDArray[np.int64]], NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class BegunBranch:
    """One that goes on behind its first draft."""

    # That it leaves.
    row: int
    # Drafts so far from the sequence's last token on, and how many follow.
    text: list[int]
    num_ahead: int


class GrowingTree:
    """The trees of sequences, as far as their drafts are made."""

    def __init__(
        self,
        tree: DraftTree,
        states: Sequence[SequenceState],
        is_read: NDArray[np.bool_],
        counts: Sequence[int],
    ) -> None:
        """Up to `counts` [S] drafts one behind another of sequences that are read to their ends."""
        self._tree, self._states, self._counts = tree, states, counts
        self._grows = [
            read and each.matcher is None and each.kept is None and each.slot < tree.num_sequences
            for each, read in zip(states, is_read.tolist(), strict=True)
        ]
        # By row of forwards: the sequence, and which branch.
        self._rows = [(index, LIKELIEST) for index in range(len(states))]
        # By sequence and branch: all drafts from the sequence's last token on.
        self._texts: dict[tuple[int, int], list[int]] = {}
        # Branches by the one that they leave, and how many drafts they share.
        self._leaving: dict[tuple[int, int], list[int]] = {}
        for number, branch in enumerate(tree.branches):
            self._leaving.setdefault((branch.parent, branch.num_shared), []).append(number)

    def begun(
        self,
        live: NDArray[np.int64],
        logits: Any,
        drawn: NDArray[np.int64],
        proposals: Sequence[Sequence[int]],
        draw: DrawBehind,
    ) -> list[BegunBranch]:
        """Begins the branches that leave what is `drawn` [R] behind live rows [R], from logits [R, V]. Those
        that go on get the next rows.
        """
        leaving: dict[int, list[int]] = {}
        for place, row in enumerate(live.tolist()):
            member, parent = self._rows[row]
            if self._grows[member] and (found := self._leaving.get((parent, len(proposals[row])))):
                leaving[place] = found
        if not leaving:
            return []
        places = np.array(list(leaving))
        begun: list[BegunBranch] = []
        most = max(self._tree.branches[number].rank for found in leaving.values() for number in found)
        tokens = likeliest(logits[places], drawn[places], live[places], most, draw)
        for said, (place, found) in zip(tokens.tolist(), leaving.items(), strict=True):
            row = int(live[place])
            begun += filter(None, [self._begin(row, number, proposals[row], said) for number in found])
        return begun

    def _begin(self, row: int, number: int, before: Sequence[int], tokens: list[int]) -> BegunBranch | None:
        """One behind the drafts of a row, by the likeliest tokens there; None where it does not go on."""
        branch, (member, _) = self._tree.branches[number], self._rows[row]
        token = tokens[branch.rank]
        # Where nothing else can be drawn, it is the same once more.
        if token in tokens[: branch.rank]:
            return None
        self._texts[member, number] = text = [*before, token]
        num_ahead = min(branch.num_drafts, self._counts[member] - branch.num_shared) - 1
        if not num_ahead:
            return None
        self._rows.append((member, number))
        return BegunBranch(row=row, text=text, num_ahead=num_ahead)

    def hand_over(self) -> None:
        """Gives sequences their branches, which become part of their next step."""
        for member, state in enumerate(self._states):
            # By number: which of those that there are.
            kept: dict[int, int] = {LIKELIEST: DRAFTS}
            branches: list[DraftBranch] = []
            for number, branch in enumerate(self._tree.branches):
                text = self._texts.get((member, number))
                if text is None:
                    continue
                kept[number] = len(branches)
                branches.append(
                    DraftBranch(
                        tokens=tuple(text[branch.num_shared :]),
                        parent=kept[branch.parent],
                        num_shared=branch.num_shared,
                        is_draft=True,
                    )
                )
            state.draft.branches = tuple(branches)


def likeliest(
    left: Any, drawn: NDArray[np.int64], rows: NDArray[np.int64], most: int, draw: DrawBehind
) -> NDArray[np.int64]:
    """What was drawn behind rows [R], and the tokens that come next to it [R, most + 1]; overwrites logits
    [R, V].
    """
    found = [drawn]
    for _ in range(most):
        left[np.arange(drawn.size), found[-1]] = NEVER_DRAWN
        found.append(draw(left, rows))
    return np.stack(found, axis=1)
