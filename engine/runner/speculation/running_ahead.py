"""Drafts by forwards, one token of each sequence after the other: what draft model and head have in common.

A draft is drawn with the same noise as the verification will draw with, so it is accepted whenever both
distributions lead to the same token; and under the grammar, whose matchers move along and come back.

Shape letters: S sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.model.draft_tree import DraftTree
from engine.runner.sequence_table import SequenceState, SequenceTable
from engine.runner.speculation.tree import BegunBranch, GrowingTree
from engine.sampling.table import sample
from kernels.sampling.rows import SamplingRows


class Tails(Protocol):
    """Where sequences end, and what computes on from there. Behind their rows lie those of branches."""

    # Arrays that have a value for each row.
    by_row: ClassVar[tuple[str, ...]] = ("slots", "outputs", "is_read")
    states: Sequence[SequenceState]
    slots: NDArray[np.int64]  # [S]
    outputs: NDArray[np.int64]  # [S] output tokens known
    is_read: NDArray[np.bool_]  # [S] whether the first forward reads a sequence to its end

    def to_read(self, budget: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sequences whose new tokens are read first, and how many of each, up to `budget` in all."""

    def logits(
        self, live: NDArray[np.int64], spans: NDArray[np.int64], proposals: Sequence[Sequence[int]]
    ) -> Any:
        """One forward of the next `spans` tokens of each live sequence, drafts among them: logits [S, V]
        behind the last ones.
        """

    def fork(self, rows: Sequence[int], num_ahead: Sequence[int]) -> None:
        """Adds rows that go on as these are behind the latest forward, each for so many forwards."""
        self.states = [*self.states, *(self.states[row] for row in rows)]
        for name in self.by_row:
            values = getattr(self, name)
            setattr(self, name, np.concatenate((values, values[list(rows)])))


def run_ahead(
    tails: Tails, counts: Sequence[int], table: SequenceTable, budget: int, tree: DraftTree | None = None
) -> list[tuple[int, ...]]:
    """Up to `counts` [S] tokens after each sequence's last one; fewer where a grammar ends, none while the
    sequence's text is still being read. With a tree sequences get its branches, as far as these go.
    """
    states, wanted = tails.states, list(counts)
    proposals: list[list[int]] = [[] for _ in states]
    live, spans = tails.to_read(budget)
    growing = None if tree is None else GrowingTree(tree, states, tails.is_read, counts)
    # Drafts move the matchers that are there; afterwards these are where those were.
    matchers = [None if each.matcher is None else each.matcher.copy() for each in states]
    try:
        step = 0
        while spans.size:
            logits = tails.logits(live, spans, proposals)
            draw = functools.partial(_draw, tails=tails, proposals=proposals, step=step, table=table)
            drawn = draw(logits, live)
            begun = growing.begun(live, logits, drawn, proposals, draw) if growing is not None else []
            # Those whose text is read, and whose draw the grammar takes, go on.
            going_on = []
            for index, token in zip(live.tolist(), drawn.tolist(), strict=True):
                if not tails.is_read[index] or not _accepts(tails.states[index], token):
                    continue
                proposals[index].append(token)
                if len(proposals[index]) < wanted[index]:
                    going_on.append(index)
            if begun:
                going_on += _fork(tails, begun, proposals, wanted)
            step += 1
            live = np.array(going_on, np.int64)
            spans = np.ones(live.size, np.int64)
    finally:
        for state, matcher, drafts in zip(states, matchers, proposals, strict=False):
            state.matcher = matcher
            state.draft.num_proposed = len(drafts)
    if growing is not None:
        growing.hand_over()
    return [tuple(drafts) for drafts in proposals[: len(states)]]


def _fork(tails: Tails, begun: Sequence[BegunBranch], proposals: list[list[int]], wanted: list[int]) -> range:
    """Adds rows for branches that go on; which they are."""
    rows = range(len(proposals), len(proposals) + len(begun))
    tails.fork([each.row for each in begun], [each.num_ahead for each in begun])
    proposals += [each.text for each in begun]
    wanted += [len(each.text) + each.num_ahead for each in begun]
    return rows


def _draw(
    logits: Any,
    live: NDArray[np.int64],
    tails: Tails,
    proposals: Sequence[Sequence[int]],
    step: int,
    table: SequenceTable,
) -> NDArray[np.int64]:
    """The tokens drawn after each live sequence [S]."""
    drafts = [proposals[index] for index in live.tolist()]
    guided, masks = _masks([tails.states[index] for index in live.tolist()], table)
    drawn = sample(
        logits,
        table.sampling,
        SamplingRows(
            slots=tails.slots[live],
            positions=tails.outputs[live] + step,
            draft_rows=np.array([row for row, tokens in enumerate(drafts) for _ in tokens], np.int64),
            draft_tokens=np.array([token for tokens in drafts for token in tokens], np.int64),
            grammar_rows=guided,
            grammar_masks=masks,
        ),
    )
    return drawn.tokens


def _accepts(state: SequenceState, token: int) -> bool:
    return state.matcher is None or state.matcher.try_accept(token)


def _masks(
    states: list[SequenceState], table: SequenceTable
) -> tuple[NDArray[np.int64], NDArray[np.int32] | None]:
    """Rows under a grammar, and their masks; a grammar that breaks here is found out later."""
    guided = {row: state.matcher for row, state in enumerate(states) if state.matcher is not None}
    if not guided:
        return np.array([], np.int64), None
    filled = table.grammar.fill([(matcher, ()) for matcher in guided.values()]).result()
    return np.array(list(guided), np.int64), filled.masks
