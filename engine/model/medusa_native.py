"""Heads of Medusa as native programs, one for each; see `medusa`. Who drafts fills in what they read, and
runs only the heads whose drafts are wanted (engine/runner/speculation/medusa).

Shape letters: S sequences, E hidden size, V ids that they draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from engine.model.native_decoder import NativeDecoder
from engine.model.program_builder import ProgramBuilder
from engine.model.records import Floats, Linear, MedusaHeads, ModelRecord, Norm
from kernels.activation.native import KINDS, ActivationArgs
from kernels.host import address_of
from kernels.native.library import Op, Program, StepStruct


def final_norm(target: ModelRecord) -> Norm:
    """The norm behind a model's last layer, without what multiplies logits, which is folded into it there."""
    norm, scale = target.norm, target.spec.logit_scale
    assert norm is not None, "the target generates"
    return replace(norm, weight=norm.weight / scale, bias=None if norm.bias is None else norm.bias / scale)


class NativeMedusaHeads:
    """Computes for up to `max_rows` sequences at a time. Not thread-safe."""

    def __init__(self, model: ModelRecord, target: NativeDecoder, *, max_rows: int) -> None:
        """`target` is the model whose final norm is theirs, and whose threads compute."""
        heads = model.draft_head
        assert isinstance(heads, MedusaHeads), "read as such"
        self.record, self.heads, self._pool = model, heads, target.pool
        self._step = StepStruct()
        builder = ProgramBuilder(model, target.library, self._step, max_rows, target.num_threads)
        # Hidden states before the final norm [S, E], which who drafts fills in.
        self.hidden = builder.stream
        self._normed = builder.norm(final_norm(target.record), "normed")
        self._norming = self._taken(builder)
        self._rows = builder.buffer("rows", model.spec.hidden_size)
        self._logits = builder.buffer("logits", model.spec.vocab_size)
        shared = len(heads.projections) == 1
        self._programs = [
            self._program(builder, blocks, heads.projections[0 if shared else number])
            for number, blocks in enumerate(heads.blocks)
        ]

    def read(self, num_rows: int) -> None:
        """Takes in the first rows of `hidden`."""
        self._step.num_tokens = num_rows
        self._norming.run(self._pool)

    def logits_of(self, number: int, rows: NDArray[np.int64]) -> Floats:
        """Logits [S, V] of a head for some of the rows that were read, valid until the next call."""
        self._rows[: rows.size] = self._normed[rows]
        self._step.num_tokens = rows.size
        self._programs[number].run(self._pool)
        return self._logits[: rows.size]

    def _program(self, builder: ProgramBuilder, blocks: Sequence[Linear], projection: Linear) -> Program:
        """One head, from `_rows` to `_logits`."""
        x, width = self._rows, self.record.spec.hidden_size
        change, total = (builder.buffer(name, width) for name in ("change", "total"))
        for block in blocks:
            builder.product(block, x, change, False)
            activation = ActivationArgs(
                step=builder.step,
                gate_up=address_of(change),
                out=address_of(change),
                width=width,
                out_stride=width,
                kind=KINDS["silu"],
                plain=1,
            )
            builder.add("activation", activation, change)
            builder.add_rows(x, change, total)
            x = total
        builder.product(projection, x, self._logits, False)
        return self._taken(builder)

    @staticmethod
    def _taken(builder: ProgramBuilder) -> Program:
        """The ops so far as a program of their own."""
        ops: list[Op] = builder.ops
        builder.ops = []
        return Program(builder.library, ops)
