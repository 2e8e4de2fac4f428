"""A step as a whole, op by op: forward, scores of prompts, logits of the rows that sample, draw."""

from __future__ import annotations

import time
from typing import Any

from engine.model.back_end import Model
from engine.runner.inputs import StepInputs
from engine.runner.kv_storage import KvStorage
from engine.runner.outcomes import Sampled
from engine.runner.prompt_scores import prompt_logprobs
from engine.runner.sequence_table import SequenceTable
from engine.runner.verification import logit_rows, sampling_rows
from engine.sampling.sampler import sample


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
