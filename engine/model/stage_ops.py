"""A forward as ops where stages of a pipeline have the model's layers: micro-batches of the step's rows, each
of which comes from the stage before and goes to the next one, so that all stages compute at a time.

Without a pipeline the step is the only micro-batch, and it neither comes nor goes. After GPipe (arXiv
1811.06965).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from engine.model.program_builder import ProgramBuilder
from kernels.native.library import StepStruct
from kernels.ranks.native import Ranks


def add_forward(
    builder: ProgramBuilder, step: ctypes.Structure, count: int, add_layers: Callable[[], None]
) -> None:
    """Adds the forward of a step, in so many micro-batches: embedding, own layers by `add_layers`, and what
    has the hidden states where they belong.
    """
    ranks = builder.ranks
    for index in range(count):
        if ranks is not None and count > 1:
            micro_batch = StepStruct()
            builder.turn_to(micro_batch)
            builder.ops.append(ranks.micro_batch_op(ctypes.addressof(step), micro_batch, index, count))
        if ranks is not None and ranks.stage:
            builder.ops.append(
                ranks.receive_op(ctypes.addressof(step), ranks.stage - 1, builder.stream, index, count)
            )
        else:
            builder.embed()
        add_layers()
        builder.finish()
        if ranks is not None and ranks.sends:
            builder.ops.append(ranks.send_op(ctypes.addressof(step), builder.stream, index, count))
    if ranks is not None and count > 1:
        builder.turn_to(step)
    if ranks is not None:
        _end(builder, ranks, ctypes.addressof(step), count)


def _end(builder: ProgramBuilder, ranks: Ranks, step: int, count: int) -> None:
    """The first rank goes on when the last stage is through, the others say that they are."""
    if not ranks.leads:
        builder.ops.append(ranks.done_op())
    elif ranks.last_stage:
        builder.ops.append(ranks.receive_op(step, ranks.last_stage, None, count - 1, count))
