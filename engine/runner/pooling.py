"""From a step's hidden states to pooled outputs: one row of numbers for each text, whatever its length.

A text may be computed in several steps (a decoder's), so what is pooled is gathered in the sequence's state.
The formulas are those of sentence-transformers' Pooling module, over all of a text's tokens.

Shape letters: T tokens, S sequences, E hidden size.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from contract.pooling import PoolingParams
from engine.model.pooled_heads import ACTIVATIONS, apply_heads, normalized
from engine.model.records import Floats, ModelRecord, Norm, PooledHead
from engine.runner.inputs import StepInputs
from engine.runner.sequence_table import SequenceState
from engine.types import SequenceResult


class Pooler:
    """Pools the texts of one model."""

    def __init__(self, record: ModelRecord) -> None:
        assert record.spec.pooling is not None, "it pools"
        self.files = record.spec.pooling
        self._heads = [_on_host(head) for head in record.heads]

    def take(self, inputs: StepInputs, hidden: Any) -> list[SequenceResult]:
        """Hidden states [T, E] of a step, after the last norm -> the outputs of the texts that end with
        it.
        """
        gathered = self._gathered(_floats(hidden), inputs)
        ended = []
        for index, (sequence, state) in enumerate(zip(inputs.scheduled, inputs.states, strict=True)):
            self._join(state, gathered, index, int(inputs.starts[index]))
            if sequence.samples:
                ended.append(index)
        if not ended:
            return []
        pooled = np.stack([cast("Floats", inputs.states[index].pooled) for index in ended])
        lengths = inputs.ends[ended].astype(np.float32)[:, None]
        if self.files.kind == "mean":
            pooled = np.asarray(pooled / lengths, np.float32)
        elif self.files.kind == "weighted":
            pooled = np.asarray(pooled / (lengths * (lengths + 1.0) / 2.0), np.float32)
        outputs = apply_heads(self._heads, np.asarray(pooled, np.float32))
        return [
            self._result(inputs.ids[index], inputs.states[index].pooling, row)
            for index, row in zip(ended, outputs, strict=True)
        ]

    def _gathered(self, hidden: Floats, inputs: StepInputs) -> Floats:
        """What each sequence's rows of this step come to [S, E]."""
        first, end = inputs.query_starts[:-1], int(inputs.query_starts[-1])
        kind, rows = self.files.kind, hidden[:end]
        if kind == "cls":
            return rows[first]
        if kind == "last":
            return rows[inputs.query_starts[1:] - 1]
        if kind == "max":
            return np.asarray(np.maximum.reduceat(rows, first, axis=0))
        if kind == "weighted":
            positions = np.arange(end) - np.repeat(first - inputs.starts, np.diff(inputs.query_starts))
            rows = rows * (positions + 1).astype(np.float32)[:, None]
        return np.asarray(np.add.reduceat(rows, first, axis=0))

    def _join(self, state: SequenceState, gathered: Floats, index: int, start: int) -> None:
        kind, row = self.files.kind, gathered[index]
        if not start or state.pooled is None or kind == "last":
            # Of a prefix that was computed before only the last row matters, which is not among it.
            state.pooled = row.copy()
        elif kind == "max":
            state.pooled = np.maximum(state.pooled, row)
        elif kind != "cls":
            state.pooled = state.pooled + row

    def _result(self, sequence_id: int, asked: PoolingParams | None, row: Floats) -> SequenceResult:
        if not np.isfinite(row).all():
            return SequenceResult(sequence_id, (), failure="the model's hidden states are not finite")
        if self.files.classifies:
            row = ACTIVATIONS[self.files.activation](row)
        else:
            dimensions = 0 if asked is None else asked.dimensions
            row = row[:dimensions] if dimensions else row
            row = normalized(row[None])[0] if self.files.normalized else row
        return SequenceResult(sequence_id, (), pooled=np.ascontiguousarray(row, "<f4").tobytes())


def _floats(values: Any) -> Floats:
    """An array in host memory, of one or of a tensor."""
    if isinstance(values, np.ndarray):
        return values
    found: NDArray[np.float32] = values.float().cpu().numpy()
    return found


def _on_host(head: PooledHead) -> PooledHead:
    norm = head.norm
    return PooledHead(
        weight=_floats(head.weight),
        bias=None if head.bias is None else _floats(head.bias),
        activation=head.activation,
        norm=None
        if norm is None
        else Norm(weight=_floats(norm.weight), eps=norm.eps, centered=norm.centered),
    )
