"""A small model of the same vocabulary proposes by running ahead.

It keeps keys and values of its own under the block ids of the target, and reads a sequence only when it is
asked for drafts: the first forward of a proposal reads what is new since the last one together with the last
token, so that `n` drafts take `n` forwards, and a sequence that does not speculate costs nothing. Contents of
a block depend on its tokens alone, so sequences that share a prefix write the same. Positions that have no
block yet use scratch blocks. States, where its layers carry some, lie in slots of its own (draft_states).

Shape letters: S sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.model.back_end import Model
from engine.model.forward_batch import ForwardBatch
from engine.runner.kv_storage import KvStorage
from engine.runner.sequence_table import SequenceState, SequenceTable
from engine.runner.speculation.draft_states import Copies, DraftStates
from engine.runner.speculation.drafter import Drafter
from engine.runner.speculation.running_ahead import Tails, run_ahead
from kernels.attention.ragged import RaggedBatch
from kernels.host import Device, Values, on_device
from kernels.linear.rows import ROW_MULTIPLE
from kernels.recurrent.rows import StateRows

if TYPE_CHECKING:
    from kernels.attention.backends import AttentionBackend

# Tokens that are read in one forward, so that a long prompt does not hold up everybody's next step.
MAX_READ_TOKENS = 512


class DraftModel(Drafter):
    """See Drafter. The draft and its cache, whose last blocks are scratch."""

    looks_up = False

    def __init__(
        self, model: Model, attention: AttentionBackend | None, storage: KvStorage, *, num_scratch_blocks: int
    ) -> None:
        self.model = model
        self.attention = attention
        self.storage = storage
        self.first_scratch = storage.num_blocks - num_scratch_blocks
        self.num_scratch_blocks = num_scratch_blocks
        self.states = DraftStates.of(model.spec, storage)

    def propose(
        self, states: Sequence[SequenceState], counts: Sequence[int], table: SequenceTable
    ) -> list[tuple[int, ...]]:
        """See Drafter; none while the sequence's text is still being read."""
        per_sequence = -(-max(counts) // self.storage.block_size) + 1
        fitting = self.num_scratch_blocks // per_sequence
        tails = _Tails(self, states[:fitting], table, per_sequence)
        found = run_ahead(tails, counts, table, MAX_READ_TOKENS)
        for state in states[fitting:]:
            state.draft.num_proposed = 0
        return found + [()] * (len(states) - len(found))

    def num_unread(self, state: SequenceState, table: SequenceTable) -> int:
        """See Drafter."""
        if self.states is not None and state.slot >= self.states.num_rooms:
            return 0
        return int(table.num_tokens[state.slot]) - self.num_read(state)

    def num_read(self, state: SequenceState) -> int:
        """Leading tokens of a sequence that need not be read again. Of drafts that were right keys and values
        are there, but no state behind each.
        """
        return state.draft.num_read if self.states is None else state.draft.num_in_state

    def ended(self, state: SequenceState, output: NDArray[np.int64]) -> None:
        """What was read of it lies under its blocks, and goes with them."""


class _Tails(Tails):
    """See Tails: where each sequence ends, and the blocks in which its drafts live."""

    def __init__(
        self,
        drafter: DraftModel,
        states: Sequence[SequenceState],
        table: SequenceTable,
        per_sequence: int,
    ) -> None:
        self.drafter = drafter
        self.states = states
        self.block_size = block_size = drafter.storage.block_size
        self.table = table
        self.slots = np.array([state.slot for state in states], np.int64)
        self.lengths = table.num_tokens[self.slots]  # [S] tokens known
        self.outputs = self.lengths - np.array([state.num_prompt for state in states], np.int64)
        owned = table.num_blocks[self.slots]
        width = int(owned.max()) + per_sequence
        self.tables = np.zeros((len(states), width), np.int64)
        for row, count in enumerate(owned.tolist()):
            self.tables[row, :count] = table.blocks[self.slots[row], :count]
            scratch = drafter.first_scratch + row * per_sequence + np.arange(per_sequence)
            self.tables[row, count : count + per_sequence] = scratch
        self.owned = owned * block_size  # [S] positions in blocks of the sequence's own
        self.starts = np.zeros(len(states), np.int64)  # [S] first position of the next forward
        self.is_read = np.zeros(len(states), np.bool_)
        # [S] of the next forward, where the model has states.
        self.state_slots = np.zeros(len(states), np.int64)
        self.copies: list[Copies] = [()] * len(states)

    def to_read(self, budget: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sequences whose new tokens are read now, and how many of each, up to `budget` in all. The last one
        lies beyond the blocks of its own where the target has not computed it yet.
        """
        live, spans = [], []
        for row, state in enumerate(self.states):
            start = min(self.drafter.num_read(state), int(self.lengths[row]) - 1)
            span = min(int(self.lengths[row]) - start, budget)
            if not span:
                break
            budget -= span
            self.starts[row] = start
            self.is_read[row] = start + span == self.lengths[row]
            state.draft.num_known, state.draft.num_owned = start + span, int(self.owned[row])
            state.draft.num_read = num_kept = min(start + span, int(self.owned[row]))
            if self.drafter.states is not None:
                state.draft.num_in_state = num_kept
                begun = self.drafter.states.begin(state.slot, start, start + span, num_kept)
                self.state_slots[row], self.copies[row] = begun
            live.append(row)
            spans.append(span)
        return np.array(live, np.int64), np.array(spans, np.int64)

    def logits(
        self, live: NDArray[np.int64], spans: NDArray[np.int64], proposals: Sequence[Sequence[int]]
    ) -> Any:
        """See Tails."""
        model, storage = self.drafter.model, self.drafter.storage
        batch = self._batch(live, spans, proposals, spare_slot=storage.spare_slot, device=model.device)
        hidden = model.forward(batch, storage.layers, self.drafter.attention)
        return model.logits_of(hidden, np.cumsum(spans) - 1)

    def _batch(
        self,
        live: NDArray[np.int64],
        spans: NDArray[np.int64],
        proposals: Sequence[Sequence[int]],
        *,
        spare_slot: int,
        device: Device,
    ) -> ForwardBatch:
        """`spans` tokens of each live sequence from its start on; moves the starts along."""
        owner = np.repeat(live, spans)
        query_starts = np.concatenate(([0], np.cumsum(spans)))
        within = np.arange(owner.size) - np.repeat(query_starts[:-1], spans)
        positions = self.starts[owner] + within
        token_ids = self.table.tokens[self.slots[owner], np.minimum(positions, self.lengths[owner] - 1)]
        for number, (row, start) in enumerate(zip(live.tolist(), query_starts.tolist(), strict=False)):
            if self.starts[row] >= self.lengths[row]:
                assert spans[number] == 1
                token_ids[start] = proposals[row][-1]
        slots = self.tables[owner, positions // self.block_size] * self.block_size
        slots = slots + positions % self.block_size
        states = self._states(live, query_starts)
        self.starts[live] += spans

        def padded(values: NDArray[np.int64], fill: int) -> Values:
            return on_device(np.pad(values, (0, -values.size % ROW_MULTIPLE), constant_values=fill), device)

        return ForwardBatch(
            token_ids=padded(token_ids, 0),
            positions=padded(positions, 0),
            slots=padded(slots, spare_slot),
            ragged=RaggedBatch(
                query_starts=query_starts,
                context_lens=self.starts[live],
                block_tables=self.tables[live],
                block_size=self.block_size,
            ),
            states=states,
            recent_rows=self.drafter.storage.recent_rows(self.slots[live]),
        )

    def _states(self, live: NDArray[np.int64], query_starts: NDArray[np.int64]) -> StateRows | None:
        """Where the states of live sequences lie; from the next forward on, where they run ahead."""
        states = self.drafter.states
        if states is None:
            return None
        copies = [self.copies[row] for row in live.tolist()]
        rows = StateRows.of(self.state_slots[live], self.starts[live], query_starts, copies)
        for row in live.tolist():
            self.state_slots[row], self.copies[row] = states.ahead(int(self.slots[row])), ()
        return rows
