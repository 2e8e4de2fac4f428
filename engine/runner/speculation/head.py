"""A trained head proposes from hidden states of the model itself (EAGLE-3; see `engine/model/eagle3`).

Of each step the hidden states of rows whose next token is confirmed, its features, are kept: the latest few
of each sequence, in a room of its own. They are read when the sequence is asked for drafts, all that have
come since the last time, and their keys and values stay in the room's blocks, the oldest of which make place
for the latest. So a sequence that does not speculate costs a copy, and none while nobody is to be asked
(Economics.passes). The head knows what was computed since the sequence came into the batch, but for such
steps: behind them, behind a prefix hit, or where a sequence is continued elsewhere, it looks back on less,
and drafts the worse for it. What drafts write is written over by what comes of them.

A place in a room is not a position: what was never read leaves no gap, and angles are those of the position.

Shape letters: S sequences, T tokens, N rooms, F features of a room, E hidden size of the target, B blocks of
a room, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.model.eagle3 import MAX_READ_TOKENS, HeadRooms
from engine.model.eagle3_native import NativeDraftHead
from engine.model.forward_batch import ForwardBatch
from engine.model.native_decoder import NativeDecoder
from engine.model.spec import NEVER_DRAWN
from engine.runner.inputs import StepInputs
from engine.runner.kv_storage import KvStorage
from engine.runner.sequence_table import SequenceState, SequenceTable
from engine.runner.speculation.drafter import Drafter
from engine.runner.speculation.running_ahead import run_ahead
from kernels.attention.ragged import RaggedBatch
from kernels.host import empty

_NOBODY = -1


class HeadDrafter(Drafter):
    """See Drafter. A sequence's slot in the table is its room."""

    looks_up = False
    keeps_steps = True

    def __init__(
        self, head: NativeDraftHead, target: NativeDecoder, storage: KvStorage, rooms: HeadRooms
    ) -> None:
        """`target` captures the layers that the head reads."""
        self.head, self.target, self.storage, self.rooms = head, target, storage, rooms
        count, kept = rooms.num_rooms, rooms.num_features
        size = target.spec.hidden_size
        # Features by position, modulo F.
        self.features = [empty((count, kept, size)) for _ in target.captured_layers]
        # By room: whose it is, and the positions behind its last feature, and behind the last one that was
        # read.
        self.owners = np.full(count, _NOBODY, np.int64)  # [N] ids of sequences
        self.seen = np.zeros(count, np.int64)  # [N]
        self.read = np.zeros(count, np.int64)  # [N]
        # Places that are filled, in blocks of this order.
        self.held = np.zeros(count, np.int64)  # [N]
        self.blocks = np.arange(count * rooms.num_blocks).reshape(count, rooms.num_blocks)  # [N, B]
        # The target's ids of those that the head draws, as far as they are drawn at all; None: the same.
        self._ids: NDArray[np.int64] | None = None
        self._columns = np.arange(head.spec.vocab_size)
        record, size = head.record.draft_head, target.spec.vocab_size
        assert record is not None, "read as a head"
        ids = self._columns if record.target_ids is None else record.target_ids
        if not np.array_equal(ids, np.arange(size)):
            self._columns = np.flatnonzero(ids < size)
            self._ids = ids[self._columns]
        self._logits = np.zeros((0, size), np.float32)
        # The plain step of which features were kept last.
        self._last: StepInputs | None = None

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
        kept = np.flatnonzero((slots < self.rooms.num_rooms) & (counts > 0))
        if not kept.size:
            return
        slots, starts, counts, firsts = slots[kept], starts[kept], counts[kept], firsts[kept]
        ids = np.array(inputs.ids, np.int64)[kept]
        others = self.owners[slots] != ids
        self.owners[slots[others]], self.held[slots[others]] = ids[others], 0
        # Where steps were not seen in between, what was read before them stays.
        anew = others | (self.seen[slots] != starts)
        self.read[slots[anew]] = starts[anew]
        self.seen[slots] = ends = starts + counts
        # Of many only the latest.
        few = np.minimum(counts, self.rooms.num_features)
        within = np.arange(int(few.sum())) - np.repeat(np.cumsum(few) - few, few)
        rows = np.repeat(firsts + counts - few, few) + within
        places = (np.repeat(ends - few, few) + within) % self.rooms.num_features
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
        places = rows % self.rooms.num_features
        for features, captured in zip(self.features, self.target.captured, strict=True):
            features[slots, places] = captured[: rows.size]
        self.seen[slots] = rows + 1
        return True

    def num_unread(self, state: SequenceState, table: SequenceTable) -> int:
        """See Drafter. What it reads is one token behind, of which the next one is known."""
        room = state.slot
        if room >= self.rooms.num_rooms or self.seen[room] != table.num_tokens[room] - 1:
            return 0
        return int(self.unread(np.array([room]))[0])

    def propose(
        self, states: Sequence[SequenceState], counts: Sequence[int], table: SequenceTable
    ) -> list[tuple[int, ...]]:
        """See Drafter; none while more is to be read than a forward may."""
        return run_ahead(_Ends(self, states, max(counts), table), counts, table, MAX_READ_TOKENS)

    def unread(self, rooms: NDArray[np.int64]) -> NDArray[np.int64]:
        """Features of rooms [S] that are there and were not read yet."""
        unread = self.seen[rooms] - self.read[rooms]
        return np.asarray(np.minimum(unread, self.rooms.num_features))

    def make_place(self, room: int, num_new: int) -> None:
        """Lets the oldest blocks of a room go for so many new places, if need be."""
        size = self.storage.block_size
        too_many = int(self.held[room]) + num_new - self.rooms.num_blocks * size
        if too_many <= 0:
            return
        gone = -(-too_many // size)
        if gone * size >= self.held[room]:
            self.held[room] = 0
            return
        self.blocks[room] = np.roll(self.blocks[room], -gone)
        self.held[room] -= gone * size

    def in_target_ids(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits of the head's own ids as those of the target's [S, V]."""
        if self._ids is None:
            return logits
        if self._logits.shape[0] < logits.shape[0]:
            self._logits = np.full((logits.shape[0], self.target.spec.vocab_size), NEVER_DRAWN, np.float32)
        found = self._logits[: logits.shape[0]]
        found[:, self._ids] = logits[:, self._columns]
        return found


class _Ends:
    """See Tails: where the rooms of sequences end."""

    def __init__(
        self, drafter: HeadDrafter, states: Sequence[SequenceState], most: int, table: SequenceTable
    ) -> None:
        self.drafter, self.states, self.table, self.most = drafter, states, table, most
        self.slots = np.array([state.slot for state in states], np.int64)
        self.outputs = table.num_tokens[self.slots] - np.array([each.num_prompt for each in states], np.int64)
        self.is_read = np.zeros(len(states), np.bool_)
        # Of the next forward: the first position of each, and its place.
        self.positions = np.zeros(len(states), np.int64)
        self.places = np.zeros(len(states), np.int64)
        # What the head left behind the latest forward [S, E], and of whom.
        self.hidden = np.zeros((0, 0), np.float32)
        self.left_of = np.zeros(0, np.int64)

    def to_read(self, budget: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See Tails."""
        drafter, live, spans = self.drafter, [], []
        unread = drafter.unread(self.slots)
        for row, (room, count) in enumerate(zip(self.slots.tolist(), unread.tolist(), strict=True)):
            span = min(count, budget)
            if not span:
                continue
            budget -= span
            drafter.make_place(room, span + self.most)
            self.positions[row] = drafter.seen[room] - count
            self.places[row] = drafter.held[room]
            self.is_read[row] = span == count
            live.append(row)
            spans.append(span)
            # What is written stays; drafts behind it do not.
            drafter.read[room] = self.positions[row] + span
            drafter.held[room] += span
        return np.array(live, np.int64), np.array(spans, np.int64)

    def logits(
        self, live: NDArray[np.int64], spans: NDArray[np.int64], proposals: Sequence[Sequence[int]]
    ) -> NDArray[np.float32]:
        """See Tails."""
        drafter, head = self.drafter, self.drafter.head
        is_first = not proposals[int(live[0])]
        ends = np.cumsum(spans) - 1
        owners = np.repeat(live, spans)
        within = np.arange(owners.size) - np.repeat(ends + 1 - spans, spans)
        positions, rooms = self.positions[owners] + within, self.slots[owners]
        if is_first:
            tokens = self.table.tokens[rooms, positions + 1]
            for rows, features in zip(head.features, drafter.features, strict=True):
                rows[: owners.size] = features[rooms, positions % drafter.rooms.num_features]
        else:
            tokens = np.array([proposals[row][-1] for row in live.tolist()], np.int64)
        batch = self._batch(live, rooms, self.places[owners] + within, tokens, positions, ends)
        layers = drafter.storage.layers
        if is_first:
            hidden = head.read(batch, layers)
        else:
            hidden = head.go_on(self.hidden[np.searchsorted(self.left_of, live)], batch, layers)
        logits = head.logits_of(hidden, ends)
        self.hidden, self.left_of = hidden[ends], live
        self.positions[live] += spans
        self.places[live] += spans
        return drafter.in_target_ids(logits)

    def _batch(
        self,
        live: NDArray[np.int64],
        rooms: NDArray[np.int64],
        places: NDArray[np.int64],
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> ForwardBatch:
        """Tokens [T] at their places in rooms [T]; `ends` [S] are the last one of each live sequence."""
        blocks, size = self.drafter.blocks, self.drafter.storage.block_size
        return ForwardBatch(
            token_ids=tokens,
            positions=positions,
            slots=blocks[rooms, places // size] * size + places % size,
            ragged=RaggedBatch(
                query_starts=np.concatenate(([0], ends + 1)),
                context_lens=places[ends] + 1,
                block_tables=blocks[self.slots[live]],
                block_size=size,
            ),
        )
