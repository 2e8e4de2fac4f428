"""A trained head proposes from hidden states of the model itself (EAGLE-3 and MTP; see `engine/model`,
`eagle3` and `mtp`).

Features are kept (see `features`) until the sequence is asked for drafts, and then read: all that have come
since the last time. Their keys and values stay in the room's blocks, the oldest of which make place for the
latest. The head knows what was computed since the sequence came into the batch, but for steps that were not
seen: behind them, behind a prefix hit, or where a sequence is continued elsewhere, it looks back on less, and
drafts the worse for it. What drafts write is written over by what comes of them.

A place in a room is not a position: what was never read leaves no gap, and angles are those of the position.

Shape letters: S sequences, T tokens, N rooms, E hidden size of the target, B blocks of a room, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.model.eagle3 import MAX_READ_TOKENS, HeadRooms
from engine.model.eagle3_native import NativeDraftHead
from engine.model.forward_batch import ForwardBatch
from engine.model.native_decoder import NativeDecoder
from engine.runner.kv_storage import KvStorage, SlotMoves
from engine.runner.sequence_table import SequenceState, SequenceTable
from engine.runner.speculation.features import FeatureDrafter
from engine.runner.speculation.running_ahead import Tails, run_ahead
from kernels.attention.ragged import RaggedBatch


class HeadDrafter(FeatureDrafter):
    """See FeatureDrafter."""

    def __init__(
        self, head: NativeDraftHead, target: NativeDecoder, storage: KvStorage, rooms: HeadRooms
    ) -> None:
        """`target` captures the layers that the head reads."""
        record = head.record.draft_head
        assert record is not None, "read as a head"
        super().__init__(
            target,
            num_rooms=rooms.num_rooms,
            num_features=rooms.num_features,
            num_drawn=head.spec.vocab_size,
            target_ids=record.target_ids,
            tree=rooms.tree,
        )
        self.head, self.storage, self.rooms = head, storage, rooms
        # Places that are filled, in blocks of this order.
        self.held = np.zeros(rooms.num_rooms, np.int64)  # [N]
        self.blocks = np.arange(rooms.num_rooms * rooms.num_blocks).reshape(rooms.num_rooms, -1)  # [N, B]
        # Of each, blocks that have gone.
        self.gone = np.zeros(rooms.num_rooms, np.int64)  # [N]

    def forget(self, rooms: NDArray[np.int64]) -> None:
        """See FeatureDrafter."""
        self.held[rooms] = 0

    def propose(
        self, states: Sequence[SequenceState], counts: Sequence[int], table: SequenceTable
    ) -> list[tuple[int, ...]]:
        """See Drafter; none while more is to be read than a forward may."""
        return run_ahead(_Ends(self, states, max(counts), table), counts, table, MAX_READ_TOKENS, self.tree)

    def scratch_blocks(self, room: int) -> Iterator[int]:
        """Those in which a room's branches go on, which lie behind all rooms."""
        assert self.tree is not None, "rooms have branches"
        each, first = self.tree.num_blocks, self.rooms.num_rooms * self.rooms.num_blocks
        return iter(range(first + room * each, first + (room + 1) * each))

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
        self.gone[room] += gone


class _Ends(Tails):
    """See Tails: where the rooms of sequences end."""

    by_row = (*Tails.by_row, "positions", "places", "blocks", "hidden", "recents")

    def __init__(
        self, drafter: HeadDrafter, states: Sequence[SequenceState], most: int, table: SequenceTable
    ) -> None:
        self.drafter, self.states, self.table, self.most = drafter, states, table, most
        self.num_texts = len(states)
        self.slots = np.array([state.slot for state in states], np.int64)
        self.outputs = table.num_tokens[self.slots] - np.array([each.num_prompt for each in states], np.int64)
        self.is_read = np.zeros(len(states), np.bool_)
        # Of the next forward: the first position of each, and its place.
        self.positions = np.zeros(len(states), np.int64)
        self.places = np.zeros(len(states), np.int64)
        # Where the newest keys of each lie whole, once it is known what is read (kernels' Step).
        self.recents = np.zeros(len(states), np.int64)
        # Blocks of each once it is known what is read, and scratch blocks of rooms that were not taken yet.
        self.blocks = np.zeros((0, 0), np.int64)
        self.scratch: dict[int, Iterator[int]] = {}
        # What the head left behind the latest forward [S, E].
        self.hidden = np.zeros((len(states), drafter.head.spec.hidden_size), np.float32)

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
        self.blocks = drafter.blocks[self.slots]
        self.recents = drafter.storage.recent_rows(self.slots, drafter.gone[self.slots])
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
        batch = self._batch(live, owners, self.places[owners] + within, tokens, positions, ends)
        layers = drafter.storage.layers
        hidden = head.read(batch, layers) if is_first else head.go_on(self.hidden[live], batch, layers)
        logits = head.logits_of(hidden, ends)
        self.hidden[live] = hidden[ends]
        self.positions[live] += spans
        self.places[live] += spans
        return drafter.in_target_ids(logits)

    def fork(self, rows: Sequence[int], num_ahead: Sequence[int]) -> None:
        """See Tails: what lies in the block in which a branch goes on is copied into its own."""
        drafter, first = self.drafter, len(self.states)
        size, copies, whole_copies = drafter.storage.block_size, [], []
        super().fork(rows, num_ahead)
        for row, (parent, count) in enumerate(zip(rows, num_ahead, strict=True), first):
            room, place, table = int(self.slots[row]), int(self.places[row]), self.blocks[row]
            scratch = self.scratch.setdefault(room, drafter.scratch_blocks(room))
            begin, end = place // size, -(-(place + count) // size)
            table[begin:end] = [next(scratch) for _ in range(begin, end)]
            within = np.arange(place % size)
            copies.append(
                np.stack([blocks[begin] * size + within for blocks in (self.blocks[parent], table)], axis=1)
            )
            # Whole keys of forks lie behind those of rooms.
            fork = drafter.rooms.num_rooms + row - self.num_texts
            self.recents[row] = 2 * fork + self.recents[parent] % 2
            pair = self.recents[[parent, row]] ^ begin % 2
            whole_copies.append(pair * size + within[:, None])
        drafter.storage.copy_slots(
            SlotMoves(np.concatenate(copies), np.concatenate(whole_copies), np.zeros((0, 2), np.int64))
        )

    def _batch(
        self,
        live: NDArray[np.int64],
        owners: NDArray[np.int64],
        places: NDArray[np.int64],
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> ForwardBatch:
        """Tokens [T] of rows [T] at their places; `ends` [S] are the last one of each live row."""
        blocks, size = self.blocks, self.drafter.storage.block_size
        return ForwardBatch(
            token_ids=tokens,
            positions=positions,
            slots=blocks[owners, places // size] * size + places % size,
            ragged=RaggedBatch(
                query_starts=np.concatenate(([0], ends + 1)),
                context_lens=places[ends] + 1,
                block_tables=blocks[live],
                block_size=size,
            ),
            recent_rows=self.recents[live],
        )
