"""Steps by torch, each put together as a whole: the oracle of the others, and whatever they do not take."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from engine.model.decoder import Decoder
from engine.runner.executors.executor import Executor, compute_step
from engine.runner.inputs import StepInputs, prepare_inputs
from engine.runner.kv_storage import KvStorage
from engine.runner.outcomes import Sampled
from engine.runner.sequence_table import SequenceTable
from engine.types import ScheduledSequence
from kernels.attention.backends import AttentionBackend


class TorchExecutor(Executor):
    """See Executor."""

    model: Decoder

    def __init__(
        self, model: Decoder, attention: AttentionBackend, storage: KvStorage, table: SequenceTable
    ) -> None:
        self.model = model
        self._attention, self._storage, self._table = attention, storage, table
        table.sampling.backend = model.kernels.names["sampling"]

    def mode(self) -> AbstractContextManager[object]:
        return torch.inference_mode()

    def prepare(self, scheduled: list[ScheduledSequence], *, ahead: bool) -> StepInputs:
        return prepare_inputs(scheduled, self._table, self._storage, self.model)

    def execute(self, inputs: StepInputs) -> Sampled:
        return compute_step(self.model, self._attention, self._storage, self._table, inputs)
