"""Turns a plan into the tensors of one step: vectorised over tokens, a little work per sequence.

Shape letters: S sequences, T tokens, C blocks of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.model.back_end import Model
from engine.model.forward_batch import ForwardBatch, WindowBlocks
from engine.runner.kv_storage import KvStorage
from engine.runner.sequence_table import SequenceState, SequenceTable
from engine.runner.speculation.branches import BranchRows, DraftBranch, SlotPath
from engine.sampling.grammar import GrammarMasks
from engine.types import ScheduledSequence
from kernels.adapters.rows import NO_ADAPTER
from kernels.attention.ragged import RaggedBatch
from kernels.host import on_device
from kernels.recurrent.rows import StateRows


def no_masks() -> None:
    """Of a step without grammars."""


@dataclass(kw_only=True)
class StepInputs:
    """One step on the host: who takes part, and the model's view of it."""

    scheduled: Sequence[ScheduledSequence]
    ids: list[int]  # [S] of the sequences
    states: list[SequenceState]
    slots: NDArray[np.int64]  # [S]
    starts: NDArray[np.int64]  # [S] position of each sequence's first token in the step
    ends: NDArray[np.int64]  # [S] position after its last one, drafts included
    query_starts: NDArray[np.int64]  # [S + 1]
    # Leading sequences whose rows are captured work, which takes its numbers from the arrays above; and what
    # the model computes of the others, None where there are none.
    num_captured: int = 0
    batch: ForwardBatch | None = None
    # The step is queued while the one before it is on the device.
    ahead: bool = False
    # Indices of those that sample under a matcher, in the order of their masks. Until the step is concluded a
    # matcher may end with its thought.
    guided: frozenset[int] = frozenset()
    # Waits for these masks.
    masks: Callable[[], GrammarMasks | None] = no_masks
    # What is computed beside the rows of the plan.
    branches: BranchRows | None = None

    def is_alive(self, member: int, table: SequenceTable) -> bool:
        """Whether a sequence of the step still has its slot."""
        return table.states.get(self.ids[member]) is self.states[member]


def gather_rows(scheduled: Sequence[ScheduledSequence], table: SequenceTable) -> StepInputs:
    """Who takes part, and where; no batch yet."""
    ids = [sequence.sequence_id for sequence in scheduled]
    states = [table.states[sequence_id] for sequence_id in ids]
    slots = np.array([state.slot for state in states], np.int64)
    starts = np.array([sequence.start for sequence in scheduled], np.int64)
    lens = np.array([sequence.num_tokens for sequence in scheduled], np.int64)
    # A row that samples ends with the last token, whatever became of drafts that the plan counts as accepted.
    # Those whose last token is not here yet begin where the plan says, or before.
    exact = np.array([sequence.samples for sequence in scheduled]) & (table.num_unread[slots] == 0)
    num_drafts = np.array([len(sequence.draft_token_ids) for sequence in scheduled], np.int64)
    starts = np.where(exact, table.num_tokens[slots] + num_drafts - lens, starts)
    query_starts = np.zeros(len(ids) + 1, np.int64)
    np.cumsum(lens, out=query_starts[1:])
    return StepInputs(
        scheduled=scheduled,
        ids=ids,
        states=states,
        slots=slots,
        starts=starts,
        ends=starts + lens,
        query_starts=query_starts,
    )


def prepare_inputs(
    scheduled: Sequence[ScheduledSequence],
    table: SequenceTable,
    storage: KvStorage,
    model: Model,
    num_captured: int = 0,
) -> StepInputs:
    """Builds the step; the first `num_captured` sequences are left out of the batch. Block tables already
    hold the plan's new blocks. Rows are padded to a multiple of the model's; padding reads token 0 and writes
    to the spare block.
    """
    inputs = gather_rows(scheduled, table)
    inputs.num_captured = num_captured
    inputs.branches = _branches(inputs, table, storage.block_size)
    table.ensure_columns(int(inputs.ends.max()))
    if num_captured < len(scheduled):
        inputs.batch = _batch_of(inputs, table, storage, model)
    return inputs


def _batch_of(inputs: StepInputs, table: SequenceTable, storage: KvStorage, model: Model) -> ForwardBatch:
    """What the model computes of the sequences that are not captured."""
    first = inputs.num_captured
    scheduled, slots = inputs.scheduled[first:], inputs.slots[first:]
    starts, ends = inputs.starts[first:], inputs.ends[first:]
    query_starts = inputs.query_starts[first:] - inputs.query_starts[first]
    block_size = storage.block_size
    for sequence, slot, end in zip(scheduled, slots, ends, strict=True):
        if sequence.draft_token_ids:
            # Beyond num_tokens, so not part of the sequence until they are accepted.
            table.tokens[slot, end - len(sequence.draft_token_ids) : end] = sequence.draft_token_ids
    total = int(query_starts[-1])
    owners, positions, order = slots, starts, np.arange(len(scheduled))
    if total > len(scheduled):
        # Somebody computes more than one token.
        order = np.repeat(order, ends - starts)
        owners, positions = slots[order], np.arange(total) - query_starts[order] + starts[order]
    # Rows: token ids, positions; then slots, in window blocks as well where there are such.
    kept, branches = storage.window_blocks, inputs.branches
    num_rows = total if branches is None else total + branches.num_rows
    rows = np.zeros((3 if kept is None else 4, num_rows + -num_rows % model.row_multiple), np.int64)
    rows[0, :total] = table.tokens[owners, positions]
    rows[1, :total] = positions
    if model.spec.num_segments and model.spec.learned_positions:
        rows[1, :total] += model.max_model_len * _in_second(inputs.states[first:], order, positions)
    _fill_slots(rows[2:], table.blocks[owners, positions // block_size], positions % block_size, storage)
    num_blocks = -(-ends // block_size)
    columns = np.arange(int(num_blocks.max()))
    tables = np.where(columns < num_blocks[:, None], table.blocks[slots, : columns.size], 0)
    hidden = _num_hidden(inputs.states[first:], starts)
    tables, context_lens = _without_hidden(inputs.states[first:], hidden, ends, tables, block_size)
    ragged = RaggedBatch(
        query_starts=query_starts, context_lens=context_lens, block_tables=tables, block_size=block_size
    )
    recent_rows = storage.recent_rows(slots, hidden)
    if branches is not None:
        branches.fill(rows[:, total:])
        ragged = branches.behind(ragged)
        recent_rows = np.concatenate((recent_rows, [path.recent for path in branches.paths]))
        owners = np.concatenate((owners, np.repeat(slots[branches.members], branches.lens)))
    token_ids, padded_positions, cache_slots, *window_slots = on_device(rows, model.device)
    return ForwardBatch(
        token_ids=token_ids,
        positions=padded_positions,
        slots=cache_slots,
        ragged=ragged,
        windows=None if kept is None else WindowBlocks(slots=window_slots[0], block_tables=kept[tables]),
        adapters=_adapters_of(table, owners, rows.shape[1]),
        states=_states_of(scheduled, table, slots, starts, query_starts) if storage.num_states else None,
        slot_copies=None if branches is None else branches.slot_copies,
        recent_rows=recent_rows,
        recent_copies=None if branches is None else branches.recent_copies,
    )


def _num_hidden(states: Sequence[SequenceState], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Blocks [S] that rows from `starts` [S] on do not look at."""
    return np.array(
        [
            0 if each.kept is None else each.kept.num_hidden(int(start))
            for each, start in zip(states, starts, strict=True)
        ],
        np.int64,
    )


def _without_hidden(
    states: Sequence[SequenceState],
    hidden: NDArray[np.int64],
    ends: NDArray[np.int64],
    tables: NDArray[np.int64],
    block_size: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Block tables [S, C] and history [S] as attention sees them: without the blocks that a sequence's row
    does not look at. Those behind move up, so that any back end can do it: what a position adds to attention
    it has in its keys, and whole blocks keep the order and the masks.
    """
    if not hidden.any():
        return tables, ends
    for row in np.flatnonzero(hidden).tolist():
        kept, count = states[row].kept, int(hidden[row])
        assert kept is not None, "it hides blocks"
        moved = tables[row, kept.num_sinks + count :]
        tables[row, kept.num_sinks : kept.num_sinks + moved.size] = moved.copy()
    lens = ends - hidden * block_size
    return np.ascontiguousarray(tables[:, : -(-int(lens.max()) // block_size)]), lens


def _fill_slots(
    rows: NDArray[np.int64], blocks: NDArray[np.int64], within: NDArray[np.int64], storage: KvStorage
) -> None:
    """Slots of places `within` blocks, and of padding behind them; in window blocks in the second row."""
    size, kept = storage.block_size, storage.window_blocks
    rows[0, : blocks.size] = blocks * size + within
    rows[0, blocks.size :] = storage.spare_slot
    if kept is not None:
        rows[1, : blocks.size] = kept[blocks] * size + within
        rows[1, blocks.size :] = storage.num_window_blocks * size


def _in_second(
    states: Sequence[SequenceState], order: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which rows [T], of states by `order`, belong to the second text of a pair."""
    begins = [
        state.pooling.second_start
        if state.pooling is not None and state.pooling.second_start
        else state.num_prompt
        for state in states
    ]
    return np.asarray(positions >= np.array(begins, np.int64)[order])


def _states_of(
    scheduled: Sequence[ScheduledSequence],
    table: SequenceTable,
    slots: NDArray[np.int64],
    starts: NDArray[np.int64],
    query_starts: NDArray[np.int64],
) -> StateRows:
    """Where the states of the sequences lie; those in table slots [S]."""
    snapshots = [sequence.snapshots for sequence in scheduled]
    return StateRows.of(table.state_slots[slots], starts, query_starts, snapshots)


def _adapters_of(table: SequenceTable, owners: NDArray[np.int64], num_rows: int) -> NDArray[np.int64] | None:
    """Slots of the adapters of rows [T], which belong to `owners` and, beyond them, to nobody; None where no
    row has one.
    """
    adapters = table.adapters[owners]
    if (adapters < 0).all():
        return None
    return np.pad(adapters, (0, num_rows - owners.size), constant_values=NO_ADAPTER)


def _branches(inputs: StepInputs, table: SequenceTable, block_size: int) -> BranchRows | None:
    """The branches that sequences of a step have, as far as it may compute them; None where there are none.
    Whatever becomes of them, they are not those of a later step.
    """
    room, found = table.branch_room, BranchRows()
    if room is None:
        return None
    num_rows = found.first_row = int(inputs.query_starts[-1])
    for member, (sequence, state) in enumerate(zip(inputs.scheduled, inputs.states, strict=True)):
        branches, state.draft.branches = state.draft.branches, ()
        if not branches:
            continue
        last = int(inputs.ends[member]) - 1 - len(sequence.draft_token_ids)
        branches = _usable(branches, sequence, state, last, table.max_model_len)
        wanted = sum(len(each.tokens) for each in branches)
        if not branches or num_rows + wanted > room.most_rows:
            continue
        num_rows += wanted
        root = SlotPath(
            table.blocks[state.slot], block_size, last, int(inputs.query_starts[member]), 2 * state.slot
        )
        rooms = room.of(state.slot), room.recent_of(state.slot)
        found.add(member, branches, sequence.draft_token_ids, last, root, *rooms)
    return found if found.branches else None


def _usable(
    branches: Sequence[DraftBranch], sequence: ScheduledSequence, state: SequenceState, last: int, most: int
) -> tuple[DraftBranch, ...]:
    """Branches of a row that is a sequence's last token with its drafts: no draft is longer than the plan's,
    behind which there may be no room, and none lies beyond the model's length. Branches have no masks, so a
    sequence under a matcher, as a thought near its budget is by now, has guesses alone.
    """
    num_drafts = len(sequence.draft_token_ids)
    if not sequence.samples or sequence.num_tokens != 1 + num_drafts or state.failure:
        return ()
    if last + 1 + max(each.num_shared + len(each.tokens) for each in branches) > most:
        return ()
    drafted = [each.num_shared + len(each.tokens) for each in branches if each.is_draft]
    if state.matcher is None and max(drafted, default=0) <= num_drafts:
        return tuple(branches)
    return tuple(each for each in branches if not each.is_draft)
