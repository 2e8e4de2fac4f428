"""What the runner asks of whatever computes its steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from engine.model.back_end import Model
from engine.runner.inputs import StepInputs
from engine.runner.kv_storage import KvStorage
from engine.runner.outcomes import Sampled, prompt_logprobs
from engine.runner.sequence_table import SequenceTable
from engine.runner.verification import logit_rows, sampling_rows
from engine.sampling.table import sample
from engine.types import ScheduledSequence

# A step as a whole, op by op: forward, scores of prompts, logits of the rows that sample, draw.


def compute_step(
    model: Model, attention: Any, storage: KvStorage, table: SequenceTable, inputs: StepInputs
) -> Sampled:
    """The step of any model; the attention is that of a decoder of torch."""
    assert inputs.batch is not None, "prepared as a whole"
    began_s = time.monotonic()
    hidden = model.forward(inputs.batch, storage.layers, attention)
    step = Sampled(inputs=inputs, rows=logit_rows(inputs), began_s=began_s, forwarded_s=time.monotonic())
    step.scores = prompt_logprobs(inputs, hidden, model, table)
    step.masks = inputs.masks()
    if step.rows.members:
        step.logits = model.logits_of(hidden, step.rows.tokens)
        step.drawn = sample(step.logits, table.sampling, sampling_rows(inputs, step.rows, step.masks))
    return step


# ---


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
