"""Per-layer embeddings as native ops; `per_layer` says what they are, and has the same in torch.

Shape letters: T tokens, L layers, P elements that each layer reads.
"""

from __future__ import annotations

from engine.model.layer_spec import SUM_SCALE
from engine.model.ops_builder import OpsBuilder
from engine.model.records import Floats, PerLayerInput, PerLayerTable
from kernels.activation.native import KINDS, ActivationArgs
from kernels.embedding.native import TABLE_TYPES, EmbeddingArgs
from kernels.host import Values, address_of, row_stride
from kernels.per_layer.native import PerLayerArgs


def read_rows(builder: OpsBuilder, given: PerLayerTable) -> Values:
    """What the layers read [T, L * P], once the stream holds the tokens' embeddings."""
    width = given.table.shape[1]
    rows, projected = builder.buffer("per_layer", width), builder.buffer("per_layer_projected", width)
    look_up = EmbeddingArgs(
        step=builder.step,
        table=address_of(given.table),
        out=address_of(rows),
        width=width,
        type=TABLE_TYPES[given.table_type],
        scale=given.scale,
        num_rows=given.table.shape[0],
    )
    builder.add("embedding", look_up, given.table, rows)
    builder.product(given.projection, builder.stream, projected, False)
    args = PerLayerArgs(
        step=builder.step,
        projected=address_of(projected),
        weight=address_of(given.norm.weight),
        rows=address_of(rows),
        num_layers=width // given.width,
        width=given.width,
        eps=given.norm.eps,
        projection_scale=given.projection_scale,
        sum_scale=SUM_SCALE,
    )
    builder.add("per_layer_inputs", args, given.norm, projected, rows)
    return rows


def add_input(builder: OpsBuilder, given: PerLayerInput, rows: Values, stream: Floats) -> None:
    """A layer's own part of `rows` [T, L * P], gated by the stream [T, E], in the builder's "change"."""
    width = given.projection.packed.inputs
    gate = builder.buffer("per_layer_gate", width)
    builder.product(given.gate, stream, gate, False)
    args = ActivationArgs(
        step=builder.step,
        gate_up=address_of(gate),
        out=address_of(gate),
        width=width,
        out_stride=row_stride(gate),
        kind=KINDS[given.activation],
        up=address_of(rows[:, given.index * width :]),
        up_stride=row_stride(rows),
    )
    builder.add("activation", args, gate, rows)
    builder.product(given.projection, gate, builder.buffer("change", stream.shape[1]), False)
