"""Per-layer embeddings (Gemma 3n and 4): a second table of embeddings, of which every layer reads a part.

What a layer reads of a token is its part of the table's row, plus a projection of the token's embedding,
normed part by part. Behind its feed-forward a layer gates that by what the stream holds, projects it and adds
it. So a token brings many more weights than are multiplied with: the table stays in its file but for the rows
asked for.

Shape letters: T tokens, E hidden size, L layers, P elements that each layer reads.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from engine.model.layer_spec import SUM_SCALE
from engine.model.layers import StepContext, multiply, read_floats, read_linear, rounded_factor, row_norm
from engine.model.records import Linear, Norm, PerLayerInput, PerLayerTable
from engine.model.spec import ModelSpec
from engine.model.weights import WeightReader
from kernels.selection import Kernels


def read_table(weights: WeightReader, spec: ModelSpec) -> PerLayerTable:
    """What all layers share."""
    given = spec.per_layer
    assert given is not None, "called for models that have one"
    width = spec.num_layers * given.width
    table = weights.keep("model.embed_tokens_per_layer.weight", (given.num_embeddings, width))
    weight = weights.linear(["model.per_layer_model_projection"], [width], spec.hidden_size)
    norm = read_floats(weights, "model.per_layer_projection_norm.weight", given.width)
    return PerLayerTable(
        table=table,
        table_type=str(table.dtype).removeprefix("torch."),
        scale=rounded_factor(given.width**0.5, table.dtype),
        projection=Linear(weight=weight),
        projection_scale=spec.hidden_size**-0.5,
        norm=Norm(weight=norm, eps=spec.norm_eps),
        width=given.width,
    )


def read_input(weights: WeightReader, prefix: str, spec: ModelSpec, index: int) -> PerLayerInput:
    """What layer `index` does with its part."""
    assert spec.per_layer is not None, "called for models that have one"
    hidden, width = spec.hidden_size, spec.per_layer.width
    return PerLayerInput(
        index=index,
        gate=read_linear(weights, [f"{prefix}.per_layer_input_gate"], [width], hidden, False),
        projection=read_linear(weights, [f"{prefix}.per_layer_projection"], [hidden], width, False),
        activation=spec.activation,
    )


def inputs_of(given: PerLayerTable, token_ids: Tensor, x: Tensor, kernels: Kernels) -> Tensor:
    """token_ids [T] and their embeddings x [T, E] -> what the layers read [T, L, P]."""
    table = cast("Tensor", given.table)
    known = token_ids < table.shape[0]
    rows = table.index_select(0, torch.where(known, token_ids, 0)) * given.scale
    projected = multiply(given.projection, x) * given.projection_scale
    parts = projected.view(x.shape[0], -1, given.width)
    normed: Tensor = kernels.norm.plain(parts, row_norm(given.norm))
    return (normed + rows.view(parts.shape)) * SUM_SCALE


def add_input(given: PerLayerInput, x: Tensor, step: StepContext) -> Tensor:
    """The stream x [T, E] -> what is to be added to it [T, E], before its norm."""
    assert step.per_layer is not None, "read when the step began"
    gate = multiply(given.gate, x, step.adapters)
    both = torch.cat((gate, step.per_layer[:, given.index]), dim=-1)
    return multiply(given.projection, step.kernels.gate(given.activation, both), step.adapters)
