"""Turns a plan into the tensors of one step: vectorised over tokens, a little work per sequence.

Shape letters: S sequences, T tokens, C blocks of the longest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kernels.attention import RaggedBatch
from engine.kernels.linear import ROW_MULTIPLE
from engine.model.forward_batch import ForwardBatch
from engine.runner.sequence_table import SequenceState, SequenceTable
from engine.types import ScheduledSequence


@dataclass(frozen=True, kw_only=True)
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
    device: torch.device,
) -> StepInputs:
    """Builds the step. Block tables already hold the plan's new blocks. Rows are padded to a multiple of 16;
    padding reads token 0 and writes to `spare_slot`.
    """
    states = [table.states[sequence.sequence_id] for sequence in scheduled]
    slots = np.array([state.slot for state in states], np.int64)
    starts = np.array([sequence.start for sequence in scheduled], np.int64)
    lens = np.array([sequence.num_tokens for sequence in scheduled], np.int64)
    ends = starts + lens
    table.ensure_columns(int(ends.max()))
    for sequence, slot, end in zip(scheduled, slots.tolist(), ends.tolist(), strict=True):
        if sequence.draft_token_ids:
            # Beyond num_tokens, so not part of the sequence until they are accepted.
            table.tokens[slot, end - len(sequence.draft_token_ids) : end] = sequence.draft_token_ids
    query_starts = np.concatenate(([0], np.cumsum(lens)))
    total = int(query_starts[-1])
    owner = np.repeat(np.arange(len(states)), lens)
    positions = np.arange(total) - query_starts[owner] + starts[owner]
    token_ids = table.tokens[slots[owner], positions]
    places = table.blocks[slots[owner], positions // block_size] * block_size + positions % block_size
    num_blocks = -(-ends // block_size)
    columns = np.arange(int(num_blocks.max()))
    tables = np.where(columns < num_blocks[:, None], table.blocks[slots][:, : columns.size], 0)
    padding = -total % ROW_MULTIPLE

    def padded(values: NDArray[np.int64], fill: int) -> torch.Tensor:
        return torch.from_numpy(np.pad(values, (0, padding), constant_values=fill)).to(device)

    batch = ForwardBatch(
        token_ids=padded(token_ids, 0),
        positions=padded(positions, 0),
        slots=padded(places, spare_slot),
        ragged=RaggedBatch(
            query_starts=query_starts, context_lens=ends, block_tables=tables, block_size=block_size
        ),
    )
    return StepInputs(scheduled=scheduled, states=states, slots=slots, query_starts=query_starts, batch=batch)
