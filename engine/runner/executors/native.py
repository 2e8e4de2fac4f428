"""Steps by the native kernels. One that follows another of the same sequences is one native call wherever
nothing but a draw comes after the model (`native_decode`).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from ctypes import c_int64

import numpy as np
from numpy.typing import NDArray

from engine.model.native_decoder import NativeDecoder
from engine.runner.base import RunnerBroken
from engine.runner.executors.executor import Executor, FollowingSteps, LastStep, compute_step
from engine.runner.inputs import StepInputs, prepare_inputs
from engine.runner.kv_storage import KvStorage
from engine.runner.outcomes import Sampled
from engine.runner.sequence_table import SequenceTable
from engine.types import ScheduledSequence
from kernels.native.library import Op, Program
from kernels.native.mirror import structure
from kernels.sampling.native import NativeDraws, sampling_library
from kernels.sampling.rows import Drawn, SamplingRows

# A decode step that follows another of the same sequences, in one native call: inputs, model, logits, draw,
# and the drawn tokens' index in the table of sequences.
# Most steps are of this kind. Between two of them lies what the host does alone, upon caches that the
# weights have passed through: so it costs by how much code and data it touches. Here it touches none of the
# arrays. Whatever else may happen in a step has it put together as a whole, which gives the same.
# Shape letters: S sequences, V vocabulary.


class NativeDecode:
    """Runs such steps. `draws` is the sampler of the same table, with the library of the model."""

    def __init__(
        self, model: NativeDecoder, table: SequenceTable, draws: NativeDraws, storage: KvStorage
    ) -> None:
        assert draws.library is model.library, "ops of one program share their threads"
        self._model = model
        self._table = table
        self._draws = draws
        self._appended = c_int64()
        self._args = structure("DecodeArgs")(
            block_size=storage.block_size, appended=ctypes.addressof(self._appended)
        )
        if storage.window_blocks is not None:
            self._args.window_blocks = _address(storage.window_blocks)
        self._first = Op(model.library, "decode_inputs", self._args)
        self._final = Op(model.library, "decode_tokens", self._args)
        self._program: Program | None = None
        # The step that the args describe, and the rows into which its like are drawn.
        self._last: LastStep | None = None
        self._rows: SamplingRows | None = None
        self._tokens = self._blocks = np.zeros((0, 0), np.int64)
        self._step: Sampled | None = None

    def takes(self, last: LastStep) -> bool:
        """Whether the step that follows `last` can be computed here, next."""
        self._table.ensure_columns(last.next_end)
        if not self._describes(last):
            self._program = self._describe(last)
        return self._program is not None

    def run(self, last: LastStep) -> Sampled:
        """Computes the step that follows `last`, which was taken: its draws, whose tokens were appended where
        all succeeded, else none; valid until the next step.
        """
        step = self._step
        assert self._program is not None, "taken before"
        assert step is not None, "described with the program"
        step.began_s = time.monotonic()
        last.num_steps += 1
        self._program.run(self._model.pool)
        step.sound = step.appended = self._appended.value != 0
        return step

    def _describes(self, last: LastStep) -> bool:
        table = self._table
        return (
            last is self._last
            and table.tokens is self._tokens
            and table.blocks is self._blocks
            and self._draws.followed is self._rows
        )

    def _describe(self, last: LastStep) -> Program | None:
        """Points the args to the arrays of a step; None while the sampler cannot follow."""
        table, args, draws, batch = self._table, self._args, self._draws, last.batch
        ragged = batch.ragged
        self._last = None
        logits = self._model.point_to_rows(last.batch, last.rows.tokens)
        rows = SamplingRows(slots=last.rows.slots, positions=last.rows.positions + 1)
        processed = draws.follow(logits, table.sampling, rows)
        if processed is None:
            return None
        self._last, self._rows, self._tokens, self._blocks = last, rows, table.tokens, table.blocks
        count = len(last.inputs.ids)
        drawn = Drawn(
            tokens=draws.tokens[:count],
            finite=draws.finite[:count],
            allowed=draws.allowed[:count],
            processed=processed,
        )
        self._step = Sampled(inputs=last.inputs, rows=last.rows, logits=logits, drawn=drawn, began_s=0.0)
        args.token_ids, args.positions = _address(batch.token_ids), _address(batch.positions)
        args.slots, args.context_lens = _address(batch.slots), _address(ragged.context_lens)
        args.block_tables, args.columns = _address(ragged.block_tables), ragged.block_tables.shape[1]
        if batch.windows is not None:
            args.window_slots = _address(batch.windows.slots)
            args.window_tables = _address(batch.windows.block_tables)
        args.sinks = None if last.sinks is None else _address(last.sinks)
        assert batch.recent_rows is not None, "as all batches of the runner's table"
        args.recent_rows = _address(batch.recent_rows)
        args.outputs, args.rows = _address(last.rows.positions), _address(last.inputs.slots)
        args.tokens, args.token_columns = _address(table.tokens), table.tokens.shape[1]
        args.blocks, args.block_columns = _address(table.blocks), table.blocks.shape[1]
        args.num_tokens, args.num_sequences = _address(table.num_tokens), count
        streams = draws.streams
        args.draws = None if streams is None else draws.described.ctypes.data
        args.streams = None if streams is None else streams.ctypes.data
        args.drawn, args.finite = draws.tokens.ctypes.data, draws.finite.ctypes.data
        args.allowed = draws.allowed.ctypes.data
        return self._model.step_program(self._first, (draws.op, self._final))


def _address(array: NDArray[np.int64]) -> int:
    assert array.dtype == np.int64
    assert array.flags.c_contiguous
    return int(array.ctypes.data)


_MODE = nullcontext()


class NativeExecutor(Executor):
    """See Executor."""

    model: NativeDecoder

    def __init__(self, model: NativeDecoder, storage: KvStorage, table: SequenceTable) -> None:
        self.model = model
        self._storage, self._table = storage, table
        self.steps = FollowingSteps(storage.block_size)
        self.decode: NativeDecode | None = None
        if model.library is sampling_library():
            table.sampling.draws = draws = NativeDraws(model.library)
            self.decode = NativeDecode(model, table, draws, storage)

    def mode(self) -> AbstractContextManager[object]:
        return _MODE

    def following(self, scheduled: Sequence[ScheduledSequence]) -> StepInputs | None:
        last = self.steps.follows(scheduled)
        if last is None or self.decode is None or not self.decode.takes(last):
            return None
        last.inputs.scheduled = scheduled
        return last.inputs

    def prepare(self, scheduled: list[ScheduledSequence], *, ahead: bool) -> StepInputs:
        return prepare_inputs(scheduled, self._table, self._storage, self.model)

    def execute(self, inputs: StepInputs) -> Sampled:
        step, ranks = self._computed(inputs), self.model.ranks
        if ranks is not None and ranks.is_over:
            raise RunnerBroken("a rank of the model was lost")
        return step

    def _computed(self, inputs: StepInputs) -> Sampled:
        last = self.steps.last
        if last is not None and last.inputs is inputs:
            assert self.decode is not None, "it takes the step"
            step = self.decode.run(last)
            if not step.sound:
                self.steps.forget()
            return step
        step = compute_step(self.model, None, self._storage, self._table, inputs)
        drawn = step.drawn
        if drawn is not None and drawn.finite.all() and drawn.allowed.all():
            self.steps.keep(inputs, step.rows)
        return step

    def forget(self) -> None:
        self.steps.forget()
