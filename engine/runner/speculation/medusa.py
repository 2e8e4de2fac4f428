"""Heads that propose from the last hidden state of the model itself, each a token further on (Medusa; see
`engine/model/medusa`).

A sequence's room holds its latest feature (see `features`), which is all that heads look back on: a prefix
hit, a continuation or steps that were not seen take nothing from them. A head computes for the sequences that
want a draft of it, in one product, and not at all where nobody does.

Shape letters: S sequences, N rooms, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.model.draft_tree import DraftTree
from engine.model.medusa_native import NativeMedusaHeads
from engine.model.native_decoder import NativeDecoder
from engine.runner.sequence_table import SequenceState, SequenceTable
from engine.runner.speculation.features import FeatureDrafter
from engine.runner.speculation.running_ahead import Tails, run_ahead


class MedusaDrafter(FeatureDrafter):
    """See FeatureDrafter."""

    def __init__(
        self, heads: NativeMedusaHeads, target: NativeDecoder, *, num_rooms: int, tree: DraftTree | None
    ) -> None:
        super().__init__(
            target,
            num_rooms=num_rooms,
            num_features=1,
            num_drawn=heads.record.spec.vocab_size,
            target_ids=heads.heads.target_ids,
            tree=tree,
        )
        self.heads = heads

    def propose(
        self, states: Sequence[SequenceState], counts: Sequence[int], table: SequenceTable
    ) -> list[tuple[int, ...]]:
        """See Drafter; no more than there are heads."""
        return run_ahead(_Latest(self, states, table), counts, table, len(states), self.tree)


class _Latest(Tails):
    """See Tails: the latest hidden state of sequences, over which one head after the other is run."""

    by_row = (*Tails.by_row, "members")

    def __init__(self, drafter: MedusaDrafter, states: Sequence[SequenceState], table: SequenceTable) -> None:
        self.drafter, self.states = drafter, states
        # The sequence of each row.
        self.members = np.arange(len(states))
        self.slots = np.array([state.slot for state in states], np.int64)
        self.outputs = table.num_tokens[self.slots] - np.array([each.num_prompt for each in states], np.int64)
        self.is_read = np.ones(len(states), np.bool_)

    def to_read(self, budget: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See Tails: one of each."""
        heads, (features,) = self.drafter.heads, self.drafter.features
        heads.hidden[: self.slots.size] = features[self.slots, 0]
        heads.read(self.slots.size)
        return np.arange(self.slots.size), np.ones(self.slots.size, np.int64)

    def logits(
        self, live: NDArray[np.int64], spans: NDArray[np.int64], proposals: Sequence[Sequence[int]]
    ) -> NDArray[np.float32]:
        """See Tails: a row's drafts say whose turn it is. Of all branches of a text a head says the same."""
        drafter = self.drafter
        members, rows = np.unique(self.members[live], return_inverse=True)
        logits = drafter.heads.logits_of(len(proposals[int(live[0])]), members)
        is_each = np.array_equal(rows, np.arange(members.size))
        return drafter.in_target_ids(logits if is_each else logits[rows])
