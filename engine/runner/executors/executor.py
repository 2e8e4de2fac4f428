"""What the runner asks of whatever computes its steps."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.model.back_end import Model
from engine.model.forward_batch import ForwardBatch
from engine.runner.branch_draws import draw_with_branches
from engine.runner.forgotten.step import ForgettingStep
from engine.runner.inputs import StepInputs
from engine.runner.kv_storage import KvStorage
from engine.runner.outcomes import LogitRows, Sampled, logit_rows, no_rows, prompt_logprobs, sampling_rows
from engine.runner.sequence_table import SequenceState, SequenceTable
from engine.sampling.table import sample
from engine.types import ScheduledSequence

# Decode steps of the same sequences as the step before: nothing of them is built anew.
# Most steps are of this kind, and for a small model putting one together takes as long as a tenth of
# computing it. `prepare_inputs` and `logit_rows` say what a step is; the op `decode_inputs`
# (kernels/native) makes the same of the last step's arrays, in place
# (tests/unit/engine/runner/test_following.py).
# Shape letters: S sequences, C blocks of the longest sequence.

# Blocks that each sequence may enter before the block tables are made anew.
SPARE_COLUMNS = 16


@dataclass(kw_only=True)
class LastStep:
    """The step before, and views of its arrays."""

    # Where each sequence computed its token, when the step was put together as a whole, and the longest one.
    starts: list[int]
    longest: int
    # Steps since then, and how many there may be before a block table needs another column.
    num_steps: int
    most_steps: float
    inputs: StepInputs
    batch: ForwardBatch
    rows: LogitRows
    # Of those that leave a block behind with each that they begin, the blocks in front of it, else -1 [S];
    # None where nobody does.
    sinks: NDArray[np.int64] | None

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
        if batch is None or inputs.branches is not None or inputs.query_starts[-1] != count:
            return
        if not _is_plain(inputs.scheduled):
            return
        if any(state.matcher is not None or state.forgotten is not None for state in inputs.states):
            # The latter are measured, layer by layer.
            return
        starts = inputs.starts.tolist()
        batch = inputs.batch = _with_spare_columns(batch)
        self.last = LastStep(
            starts=starts,
            longest=max(starts),
            num_steps=0,
            most_steps=min(
                [
                    batch.ragged.block_tables.shape[1] * self._block_size - max(batch.ragged.context_lens),
                    *map(_num_alike, inputs.states, starts),
                    # This step has drawn one, and nobody looks at a thought on the way.
                    *(state.thought.num_free - 1 for state in inputs.states if state.thought is not None),
                ]
            ),
            inputs=inputs,
            batch=batch,
            rows=rows,
            sinks=_sinks_of(inputs.states, starts),
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
            if each.num_tokens != 1 or not each.samples or each.draft_token_ids or each.snapshots:
                return None
        return last


def _num_alike(state: SequenceState, start: int) -> float:
    """Steps behind a row at `start` until the sequence begins to forget, which changes all of its table."""
    kept = state.kept
    return math.inf if kept is None or start >= kept.start else kept.start - 1 - start


def _sinks_of(states: Sequence[SequenceState], starts: Sequence[int]) -> NDArray[np.int64] | None:
    """See LastStep; of sequences whose rows begin at `starts`."""
    sinks = np.full(len(starts), -1, np.int64)
    for member, (state, start) in enumerate(zip(states, starts, strict=True)):
        kept = state.kept
        if kept is not None and kept.moves_on and start >= kept.start:
            sinks[member] = kept.num_sinks
    return sinks if (sinks >= 0).any() else None


def _with_spare_columns(batch: ForwardBatch) -> ForwardBatch:
    """The same batch with columns for the blocks to come."""
    windows = batch.windows
    if windows is not None:
        windows = replace(windows, block_tables=_widened(windows.block_tables))
    ragged = replace(batch.ragged, block_tables=_widened(batch.ragged.block_tables))
    return replace(batch, ragged=ragged, windows=windows)


def _widened(tables: NDArray[np.int64]) -> NDArray[np.int64]:
    wide = np.zeros((tables.shape[0], tables.shape[1] + SPARE_COLUMNS), np.int64)
    wide[:, : tables.shape[1]] = tables
    return wide


def _is_plain(scheduled: Sequence[ScheduledSequence]) -> bool:
    """Whether every sequence computes one token and draws the next, and leaves nothing but that."""
    return all(
        each.num_tokens == 1 and each.samples and not each.draft_token_ids and not each.snapshots
        for each in scheduled
    )


# A step as a whole, op by op: forward, scores of prompts, logits of the rows that sample, draw.


def compute_step(
    model: Model, attention: Any, storage: KvStorage, table: SequenceTable, inputs: StepInputs
) -> Sampled:
    """The step of any model; the attention is that of a decoder of torch."""
    assert inputs.batch is not None, "prepared as a whole"
    began_s = time.monotonic()
    forgetting: ForgettingStep | None = None
    if any(state.kept is not None for state in inputs.states):
        forgetting = ForgettingStep(inputs, table, storage)
        hidden = forgetting.forward(model, attention)
    else:
        hidden = model.forward(inputs.batch, storage.layers, attention)
    if table.pool is not None:
        step = Sampled(inputs=inputs, rows=no_rows(), began_s=began_s, forwarded_s=time.monotonic())
        step.pooled = table.pool(inputs, hidden)
        return step
    step = Sampled(inputs=inputs, rows=logit_rows(inputs), began_s=began_s, forwarded_s=time.monotonic())
    step.scores = prompt_logprobs(inputs, hidden, model, table)
    step.masks = inputs.masks()
    branches = inputs.branches
    if branches is not None:
        draw_with_branches(step, branches, hidden, model, table, storage)
    elif step.rows.members:
        step.logits = model.logits_of(hidden, step.rows.tokens)
        step.drawn = sample(step.logits, table.sampling, sampling_rows(inputs, step.rows, step.masks))
    if forgetting is not None:
        # Last: a step that is computed once more begins with the whole prompt.
        step.lost = forgetting.concluded()
    return step


class StepTooLargeError(Exception):
    """Memory ended on the way of a step, and nothing of it counts. In parts it may fit."""


class Executor(Protocol):
    """Computes steps with one model over one cache and one sequence table, one after another. What has a body
    here is true of whoever waits for each step and keeps nothing of it.
    """

    model: Model

    def mode(self) -> AbstractContextManager[object]:
        """What a step is applied, computed and concluded in."""

    def runs_ahead(self, scheduled: Sequence[ScheduledSequence]) -> bool:
        """Whether these rows can be computed while the step before them is still on the device."""
        return False

    def following(self, scheduled: Sequence[ScheduledSequence]) -> StepInputs | None:
        """Inputs of a step that is the last one's sequences with their next tokens, where that is known here;
        they go to `execute` next. None for any other step.
        """
        return None

    def prepare(self, scheduled: list[ScheduledSequence], *, ahead: bool) -> StepInputs:
        """Inputs of rows that can be computed, put together as a whole; `ahead` as `runs_ahead` said."""

    def execute(self, inputs: StepInputs) -> Sampled:
        """Computes the step and draws."""

    def forget(self) -> None:
        """The next step does not follow the last one: sequences ended, are new, or have other blocks."""
        return

    def raise_if_broken(self, error: Exception) -> None:
        """Raises RunnerBroken for an error after which no later step can succeed. A CPU is not lost."""
        return
