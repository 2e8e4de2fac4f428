"""Steps by the native kernels. One that follows another of the same sequences is one native call wherever
nothing but a draw comes after the model (`native_decode`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from engine.model.native_decoder import NativeDecoder
from engine.runner.executors.eager import compute_step
from engine.runner.executors.executor import Executor
from engine.runner.executors.following import FollowingSteps
from engine.runner.executors.native_decode import NativeDecode
from engine.runner.inputs import StepInputs, prepare_inputs
from engine.runner.kv_storage import KvStorage
from engine.runner.outcomes import Sampled
from engine.runner.sequence_table import SequenceTable
from engine.types import ScheduledSequence
from kernels.sampling.native import NativeDraws, sampling_library

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
            self.decode = NativeDecode(model, table, draws, block_size=storage.block_size)

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
