"""A step some of whose sequences forget: what it does around the forward of any model, for those alone.

Used by the executors for steps with such sequences; of others nothing of this folder runs.

Shape letters: S sequences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.model.back_end import Model
from engine.model.watched import StepWatcher, Watcher
from engine.runner.forgotten.meter import LossMeter, WatchedAttention, meter_of, take_forgotten
from engine.runner.forgotten.scores import reader_of
from engine.runner.forgotten.votes import choose, counter_of, with_votes
from engine.runner.inputs import StepInputs
from engine.runner.kv_storage import KvStorage
from engine.runner.sequence_table import SequenceTable


class ForgettingStep:
    """One step, from before its forward to behind its draw."""

    def __init__(self, inputs: StepInputs, table: SequenceTable, storage: KvStorage) -> None:
        self._inputs = inputs
        self._table = table
        self._storage = storage
        self._meter: LossMeter | None = None

    def forward(self, model: Model, attention: Any) -> Any:
        """Hidden states of the step's rows; `attention` is that of a decoder of torch. Meanwhile it is
        measured what rows lose, and prompts' queries vote.
        """
        inputs, caches, table = self._inputs, self._storage.layers, self._table
        self._take(inputs.starts)
        batch = inputs.batch
        assert batch is not None, "prepared as a whole"
        kept = [(state.kept, state.forgotten) for state in inputs.states]
        self._meter = meter_of(kept, inputs.starts, batch, caches)
        votes = [state.votes for state in inputs.states]
        watchers: list[Watcher] = [] if self._meter is None else [self._meter]
        if attention is None:
            batch = inputs.batch = with_votes(votes, inputs.starts, batch, caches)
        elif (counter := counter_of(votes, inputs.starts, batch, caches)) is not None:
            watchers.append(counter)
        reader = reader_of(votes, inputs.starts, batch, caches, table.scorer, model.spec.attending)
        if watchers or reader is not None:
            watched: StepWatcher = WatchedAttention(attention, watchers, reader)
            attention = watched
        hidden = model.forward(batch, caches, attention)
        for each, end in zip(votes, inputs.ends.tolist(), strict=True):
            if each is not None:
                each.next = max(each.next, end)
        # Before the blocks can be another's.
        self._take(inputs.ends)
        return hidden

    def concluded(self) -> dict[int, tuple[float, ...]]:
        """What positions of rows have lost at most, by index in the step. Of the prompts that end with the
        step, what their queries voted for is all that is kept from here on.
        """
        table, storage = self._table, self._storage
        for state, end in zip(self._inputs.states, self._inputs.ends.tolist(), strict=True):
            if state.votes is not None and end == state.votes.kept.start:
                blocks = table.blocks[state.slot]
                choose(state.votes, blocks, storage.layers, storage.num_blocks, state.forgotten)
                state.votes = None
        return {} if self._meter is None else self._meter.shares()

    def _take(self, positions: NDArray[np.int64]) -> None:
        """Takes the keys that rows from `positions` [S] on do not look at, of those that are measured."""
        table, storage = self._table, self._storage
        for state, position in zip(self._inputs.states, positions.tolist(), strict=True):
            if state.kept is not None and state.forgotten is not None and not state.kept.num_fresh:
                blocks = table.blocks[state.slot]
                take_forgotten(
                    state.forgotten, state.kept, position, blocks, storage.layers, storage.num_blocks
                )
