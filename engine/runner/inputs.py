"""Turns a plan into the tensors of one step: vectorised over tokens, a little work per sequence.

Shape letters: S sequences, T tokens, C blocks of the longest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.kernels.attention.ragged import RaggedBatch
from engine.kernels.host import Device
from engine.kernels.transfer import on_device
from engine.model.forward_batch import ForwardBatch
from engine.runner.sequence_table import SequenceState, SequenceTable
from engine.types import ScheduledSequence


@dataclass(kw_only=True)
class StepInputs:
    """One step on the host: who takes part, and the model's view of it."""

    scheduled: list[ScheduledSequence]
    states: list[SequenceState]
    slots: NDArray[np.int64]  # [S]
    query_starts: NDArray[np.int64]  # [S + 1]
    batch: ForwardBatch


def prepare_inputs(
    scheduled: list[ScheduledSequence],
    table: SequenceTable,
    *,
    block_size: int,
    spare_slot: int,
    device: Device,
    row_multiple: int,
) -> StepInputs:
    """Builds the step. Block tables already hold the plan's new blocks. Rows are padded to a multiple of
    `row_multiple`; padding reads token 0 and writes to `spare_slot`.
    """
    states = [table.states[sequence.sequence_id] for sequence in scheduled]
    slots = np.array([state.slot for state in states], np.int64)
    starts = np.array([sequence.start for sequence in scheduled], np.int64)
    lens = np.array([sequence.num_tokens for sequence in scheduled], np.int64)
    ends = starts + lens
    longest = int(ends.max())
    table.ensure_columns(longest)
    for sequence, slot, end in zip(scheduled, slots, ends, strict=True):
        if sequence.draft_token_ids:
            # Beyond num_tokens, so not part of the sequence until they are accepted.
            table.tokens[slot, end - len(sequence.draft_token_ids) : end] = sequence.draft_token_ids
    query_starts = np.zeros(len(states) + 1, np.int64)
    np.cumsum(lens, out=query_starts[1:])
    total = int(query_starts[-1])
    if total == len(states):
        # One token each: plain decoding.
        owners, positions = slots, starts
    else:
        order = np.repeat(np.arange(len(states)), lens)
        owners = slots[order]
        positions = np.arange(total) - query_starts[order] + starts[order]
    # Rows: token ids, positions, slots.
    rows = np.zeros((3, total + -total % row_multiple), np.int64)
    rows[0, :total] = table.tokens[owners, positions]
    rows[1, :total] = positions
    rows[2, :total] = table.blocks[owners, positions // block_size] * block_size + positions % block_size
    rows[2, total:] = spare_slot
    num_blocks = -(-ends // block_size)
    columns = np.arange(-(-longest // block_size))
    tables = np.where(columns < num_blocks[:, None], table.blocks[slots, : columns.size], 0)
    token_ids, padded_positions, places = on_device(rows, device)
    batch = ForwardBatch(
        token_ids=token_ids,
        positions=padded_positions,
        slots=places,
        ragged=RaggedBatch(
            query_starts=query_starts, context_lens=ends, block_tables=tables, block_size=block_size
        ),
    )
    return StepInputs(scheduled=scheduled, states=states, slots=slots, query_starts=query_starts, batch=batch)
