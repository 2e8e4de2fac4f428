"""Steps by the native kernels. One that follows another of the same sequences is not put together anew, and
is one native call wherever nothing but a draw comes after the model (`native_decode`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from engine.kernels.sampling.native import NativeDraws, sampling_library
from engine.model.native_decoder import NativeDecoder
from engine.runner.executors.eager import EagerSteps
from engine.runner.executors.executor import Executor
from engine.runner.executors.following import FollowingSteps
from engine.runner.executors.native_decode import NativeDecode
from engine.runner.inputs import StepInputs, prepare_inputs
from engine.runner.kv_storage import KvStorage
from engine.runner.outcomes import Sampled
from engine.runner.sequence_table import SequenceTable
from engine.types import ScheduledSequence

_MODE = nullcontext()


class NativeExecutor(Executor):
    """See Executor."""

    model: NativeDecoder

    def __init__(self, model: NativeDecoder, storage: KvStorage, table: SequenceTable) -> None:
        self.model = model
        self._storage, self._table = storage, table
        self._eager = EagerSteps(model, None, storage, table)
        self.steps = FollowingSteps(table, storage.block_size)
        self.decode: NativeDecode | None = None
        if model.library is sampling_library():
            table.sampling.draws = draws = NativeDraws(model.library)
            self.decode = NativeDecode(model, table, draws, block_size=storage.block_size)

    def mode(self) -> AbstractContextManager[object]:
        return _MODE

    def following(self, scheduled: Sequence[ScheduledSequence]) -> StepInputs | None:
        last = self.steps.follows(scheduled)
        if last is None:
            return None
        last.inputs.scheduled = scheduled
        return last.inputs

    def prepare(self, scheduled: list[ScheduledSequence], *, ahead: bool) -> StepInputs:
        return prepare_inputs(scheduled, self._table, self._storage, self.model)

    def execute(self, inputs: StepInputs) -> Sampled:
        steps = self.steps
        last = steps.last
        if last is None or last.inputs is not inputs:
            step = self._eager.compute(inputs)
            if _all_succeeded(step):
                steps.keep(inputs, step.rows)
            return step
        called = None if self.decode is None else self.decode.run(last)
        if called is not None:
            if not called.sound:
                steps.forget()
            return called
        steps.count_on(last)
        step = self._eager.compute(inputs, last.rows)
        if not _all_succeeded(step):
            steps.forget()
        return step

    def forget(self) -> None:
        self.steps.forget()


def _all_succeeded(step: Sampled) -> bool:
    drawn = step.drawn
    return drawn is not None and bool(drawn.finite.all() and drawn.allowed.all())
