"""Decode steps of the same sequences as the step before: what changes is counted on, nothing is built anew.

Most steps are of this kind, and for a small model putting one together takes as long as a tenth of computing
it. `prepare_inputs` and `logit_rows` say what a step is; this gives the same arrays, changed in place
(tests/unit/engine/runner/test_steady.py).

Shape letters: S sequences, C blocks of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.kernels.host import as_array, on_host
from engine.runner.inputs import StepInputs
from engine.runner.sequence_table import SequenceTable
from engine.runner.verification import LogitRows
from engine.types import ScheduledSequence


@dataclass(frozen=True, kw_only=True)
class _Last:
    """The step before, and views of its arrays."""

    ids: list[int]
    inputs: StepInputs
    rows: LogitRows
    token_ids: NDArray[np.int64]  # [S]
    positions: NDArray[np.int64]  # [S]
    places: NDArray[np.int64]  # [S] where keys and values go
    # Tokens of a sequence before those that count as output, less one.
    num_before: NDArray[np.int64]  # [S]


class SteadyDecode:
    """The last step, if another like it may follow. Arrays of a step hold until the next one is asked for."""

    def __init__(self, table: SequenceTable, block_size: int) -> None:
        self._table = table
        self._block_size = block_size
        self._last: _Last | None = None

    def forget(self) -> None:
        """The sequences of the last step are not the same any more: ended, new, or of other blocks."""
        self._last = None

    def keep(self, inputs: StepInputs, rows: LogitRows) -> None:
        """Takes note of a step that was put together as a whole."""
        count, batch = len(inputs.scheduled), inputs.batch
        self._last = None
        token_ids = on_host(batch.token_ids)
        if token_ids is None or token_ids.size != count:
            return
        positions = as_array(batch.positions)
        if not _is_plain(inputs.scheduled) or any(state.matcher is not None for state in inputs.states):
            return
        self._last = _Last(
            ids=[sequence.sequence_id for sequence in inputs.scheduled],
            inputs=inputs,
            rows=rows,
            token_ids=token_ids,
            positions=positions,
            places=as_array(batch.slots),
            num_before=positions - rows.positions,
        )

    def following(self, scheduled: list[ScheduledSequence]) -> tuple[StepInputs, LogitRows] | None:
        """The next step, where it is the last one's sequences with their next tokens; else None."""
        last = self._last
        if last is None or [sequence.sequence_id for sequence in scheduled] != last.ids:
            return None
        starts = np.fromiter((sequence.start for sequence in scheduled), np.int64, len(scheduled))
        ragged, size = last.inputs.batch.ragged, self._block_size
        if not _is_plain(scheduled) or (starts != last.positions + 1).any():
            return None
        if int(starts.max()) >= ragged.block_tables.shape[1] * size:
            # The table gets another column.
            return None
        table, slots = self._table, last.inputs.slots
        last.positions[:] = starts
        last.token_ids[:] = table.tokens[slots, starts]
        np.add(last.places, 1, out=last.places)
        np.add(starts, 1, out=ragged.context_lens)
        np.subtract(starts, last.num_before, out=last.rows.positions)
        columns, within = np.divmod(starts, size)
        entering = np.flatnonzero(within == 0)
        if entering.size:
            blocks = table.blocks[slots[entering], columns[entering]]
            ragged.block_tables[entering, columns[entering]] = blocks
            last.places[entering] = blocks * size
        inputs = StepInputs(
            scheduled=scheduled,
            states=last.inputs.states,
            slots=slots,
            query_starts=last.inputs.query_starts,
            batch=last.inputs.batch,
        )
        return inputs, last.rows


def _is_plain(scheduled: Sequence[ScheduledSequence]) -> bool:
    """Whether every sequence computes one token and draws the next."""
    return all(each.num_tokens == 1 and each.samples and not each.draft_token_ids for each in scheduled)
