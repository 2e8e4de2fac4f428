"""What those who draft from hidden states of the model itself keep of its steps.

Of each step the hidden states of rows whose next token is confirmed, its features, are kept: the latest few
of each sequence, in a room of its own. So a sequence that does not speculate costs a copy, and none while
nobody is to be asked (Economics.passes).

Shape letters: S sequences, N rooms, F features of a room, E hidden size of the target, V vocabulary.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.model.draft_tree import DraftTree
from engine.model.native_decoder import NativeDecoder
from engine.model.spec import NEVER_DRAWN
from engine.runner.inputs import StepInputs
from engine.runner.sequence_table import SequenceState, SequenceTable
from engine.runner.speculation.drafter import Drafter
from kernels.host import empty

_NOBODY = -1


class FeatureDrafter(Drafter):
    """See Drafter. A sequence's slot in the table is its room. Heads say how they propose."""

    looks_up = False
    keeps_steps = True

    def __init__(
        self,
        target: NativeDecoder,
        *,
        num_rooms: int,
        num_features: int,
        num_drawn: int,
        target_ids: NDArray[np.int64] | None,
        tree: DraftTree | None,
    ) -> None:
        """`target` captures the layers that are read. Heads draw `num_drawn` ids of their own, which are
        `target_ids` of the target's [num_drawn]; None: the same. `tree`: None where drafts are chains.
        """
        self.tree = tree
        self.rows_beside = () if tree is None else tree.rows_beside
        self.target, self.num_rooms, self.num_features = target, num_rooms, num_features
        # Features by position, modulo F.
        self.features = [
            empty((num_rooms, num_features, target.spec.hidden_size)) for _ in target.captured_layers
        ]
        # By room: whose it is, and the positions behind its last feature, and behind the last one that was
        # read.
        self.owners = np.full(num_rooms, _NOBODY, np.int64)  # [N] ids of sequences
        self.seen = np.zeros(num_rooms, np.int64)  # [N]
        self.read = np.zeros(num_rooms, np.int64)  # [N]
        # The target's ids of those that are drawn, as far as the target draws them at all; None: the same.
        self._ids: NDArray[np.int64] | None = None
        self._columns, size = np.arange(num_drawn), target.spec.vocab_size
        ids = self._columns if target_ids is None else target_ids
        if not np.array_equal(ids, np.arange(size)):
            self._columns = np.flatnonzero(ids < size)
            self._ids = ids[self._columns]
        self._logits = np.zeros((0, size), np.float32)
        # The plain step of which features were kept last.
        self._last: StepInputs | None = None

    def forget(self, rooms: NDArray[np.int64]) -> None:
        """Rooms [S] have other owners."""
        return

    def saw(self, inputs: StepInputs, table: SequenceTable) -> None:
        """Keeps the features of those rows whose next token is confirmed."""
        batch = inputs.batch
        assert batch is not None, "put together as a whole"
        slots = inputs.slots
        positions = np.asarray(batch.positions)
        if self._goes_on(inputs, positions):
            return
        firsts = inputs.query_starts[:-1]
        starts = positions[firsts]
        counts = np.minimum(np.diff(inputs.query_starts), table.num_tokens[slots] - 1 - starts)
        kept = np.flatnonzero((slots < self.num_rooms) & (counts > 0))
        if not kept.size:
            return
        slots, starts, counts, firsts = slots[kept], starts[kept], counts[kept], firsts[kept]
        ids = np.array(inputs.ids, np.int64)[kept]
        others = self.owners[slots] != ids
        self.owners[slots[others]] = ids[others]
        self.forget(slots[others])
        # Where steps were not seen in between, what was read before them stays.
        anew = others | (self.seen[slots] != starts)
        self.read[slots[anew]] = starts[anew]
        self.seen[slots] = ends = starts + counts
        # Of many only the latest.
        few = np.minimum(counts, self.num_features)
        within = np.arange(int(few.sum())) - np.repeat(np.cumsum(few) - few, few)
        rows = np.repeat(firsts + counts - few, few) + within
        places = (np.repeat(ends - few, few) + within) % self.num_features
        rooms = np.repeat(slots, few)
        for features, captured in zip(self.features, self.target.captured, strict=True):
            features[rooms, places] = captured[rows]
        if int(inputs.query_starts[-1]) == kept.size == len(inputs.ids):
            self._last = inputs

    def _goes_on(self, inputs: StepInputs, positions: NDArray[np.int64]) -> bool:
        """Keeps those of a step that follows a plain one of the same sequences, as most do: a row of each.
        The arrays of such steps are the same, in place, as long as their sequences are.
        """
        if inputs is not self._last:
            self._last = None
            return False
        slots, rows = inputs.slots, positions[: len(inputs.ids)]
        if not np.array_equal(self.seen[slots], rows):
            self._last = None
            return False
        places = rows % self.num_features
        for features, captured in zip(self.features, self.target.captured, strict=True):
            features[slots, places] = captured[: rows.size]
        self.seen[slots] = rows + 1
        return True

    def num_unread(self, state: SequenceState, table: SequenceTable) -> int:
        """See Drafter. What it reads is one token behind, of which the next one is known."""
        room = state.slot
        if room >= self.num_rooms or self.seen[room] != table.num_tokens[room] - 1:
            return 0
        return int(self.unread(np.array([room]))[0])

    def unread(self, rooms: NDArray[np.int64]) -> NDArray[np.int64]:
        """Features of rooms [S] that are there and were not read yet."""
        unread = self.seen[rooms] - self.read[rooms]
        return np.asarray(np.minimum(unread, self.num_features))

    def in_target_ids(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits of the head's own ids as those of the target's [S, V]."""
        if self._ids is None:
            return logits
        if self._logits.shape[0] < logits.shape[0]:
            self._logits = np.full((logits.shape[0], self.target.spec.vocab_size), NEVER_DRAWN, np.float32)
        found = self._logits[: logits.shape[0]]
        found[:, self._ids] = logits[:, self._columns]
        return found
