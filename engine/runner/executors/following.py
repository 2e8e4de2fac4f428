"""Decode steps of the same sequences as the step before: nothing of them is built anew.

Most steps are of this kind, and for a small model putting one together takes as long as a tenth of computing
it. `prepare_inputs` and `logit_rows` say what a step is; the op `decode_inputs` (kernels/native) makes
the same of the last step's arrays, in place (tests/unit/engine/runner/test_following.py).

Shape letters: S sequences, C blocks of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.model.forward_batch import ForwardBatch
from engine.runner.inputs import StepInputs
from engine.runner.verification import LogitRows
from engine.types import ScheduledSequence

# Blocks that each sequence may enter before the block tables are made anew.
_SPARE_COLUMNS = 16


@dataclass(kw_only=True)
class LastStep:
    """The step before, and views of its arrays."""

    # Where each sequence computed its token, when the step was put together as a whole, and the longest one.
    starts: list[int]
    longest: int
    # Steps since then, and how many there may be before a block table needs another column.
    num_steps: int
    most_steps: int
    inputs: StepInputs
    batch: ForwardBatch
    rows: LogitRows

    @property
    def next_end(self) -> int:
        """Tokens of the longest sequence, with the one that the step after this one draws."""
        return self.longest + self.num_steps + 3


class FollowingSteps:
    """The last step, if another like it may follow. Arrays of a step hold until the next one is asked for."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.last: LastStep | None = None

    def forget(self) -> None:
        """The last step's sequences are not the same any more: ended, failed, new, or of other blocks."""
        self.last = None

    def keep(self, inputs: StepInputs, rows: LogitRows) -> None:
        """Takes note of a step that was put together as a whole, and whose draws succeeded."""
        count, batch = len(inputs.scheduled), inputs.batch
        self.last = None
        if batch is None or inputs.query_starts[-1] != count or not _is_plain(inputs.scheduled):
            return
        if any(state.matcher is not None for state in inputs.states):
            return
        starts = inputs.starts.tolist()
        batch = inputs.batch = _with_spare_columns(batch)
        self.last = LastStep(
            starts=starts,
            longest=max(starts),
            num_steps=0,
            most_steps=batch.ragged.block_tables.shape[1] * self._block_size - 1 - max(starts),
            inputs=inputs,
            batch=batch,
            rows=rows,
        )

    def follows(self, scheduled: Sequence[ScheduledSequence]) -> LastStep | None:
        """The last step, where the next one is its sequences with their next tokens; else None."""
        last = self.last
        if last is None or last.num_steps >= last.most_steps or len(scheduled) != len(last.starts):
            return None
        ahead = last.num_steps + 1
        for each, sequence_id, start in zip(scheduled, last.inputs.ids, last.starts, strict=True):
            if each.sequence_id != sequence_id or each.start != start + ahead:
                return None
            if each.num_tokens != 1 or not each.samples or each.draft_token_ids:
                return None
        return last


def _with_spare_columns(batch: ForwardBatch) -> ForwardBatch:
    """The same batch with columns for the blocks to come."""
    tables = batch.ragged.block_tables
    wide = np.zeros((tables.shape[0], tables.shape[1] + _SPARE_COLUMNS), np.int64)
    wide[:, : tables.shape[1]] = tables
    return replace(batch, ragged=replace(batch.ragged, block_tables=wide))


def _is_plain(scheduled: Sequence[ScheduledSequence]) -> bool:
    """Whether every sequence computes one token and draws the next."""
    return all(each.num_tokens == 1 and each.samples and not each.draft_token_ids for each in scheduled)
