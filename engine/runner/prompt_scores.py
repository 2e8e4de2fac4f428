"""Log-probabilities of prompt tokens, chunk by chunk as the prompt is computed."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.model.back_end import Model
from engine.runner.inputs import StepInputs
from engine.runner.sequence_table import SequenceTable
from engine.sampling.logprobs import token_logprobs
from engine.types import TokenLogprobs

# Rows of logits that are alive at once.
ROWS_AT_ONCE = 128


def prompt_logprobs(
    inputs: StepInputs, hidden: Any, model: Model, table: SequenceTable
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """Index of a sequence in the step to the log-probabilities of the prompt tokens after each that was
    computed.

    A step over positions [a, b) reports the tokens at a+1..b, as far as they are prompt; the first token of a
    prompt has none. So the sequence must compute its whole prompt: no prefix hit.
    """
    found: dict[int, tuple[TokenLogprobs, ...]] = {}
    for index, (sequence, state) in enumerate(zip(inputs.scheduled, inputs.states, strict=True)):
        wanted = state.sampling.prompt_logprobs
        end = min(sequence.start + sequence.num_tokens + 1, state.num_prompt)
        if wanted is None or end <= sequence.start + 1:
            continue
        first = int(inputs.query_starts[index])
        targets = table.tokens[state.slot, sequence.start + 1 : end].tolist()
        parts: list[TokenLogprobs] = []
        for start in range(0, len(targets), ROWS_AT_ONCE):
            piece = targets[start : start + ROWS_AT_ONCE]
            logits = model.logits_of(hidden, np.arange(first + start, first + start + len(piece)))
            parts.extend(token_logprobs(logits, piece, [wanted] * len(piece), native=table.sampling.native))
        found[index] = tuple(parts)
    return found
