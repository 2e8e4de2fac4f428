"""Reads heads of Medusa into a model's record; see `medusa`.

Shape letters: E hidden size, V ids that they draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.eagle3_reading import checked_ids
from engine.model.layer_spec import MedusaSpec
from engine.model.layers import read_linear
from engine.model.medusa import TOKEN_MAP, projection_name
from engine.model.records import Linear, MedusaHeads, ModelRecord
from engine.model.spec import ModelSpec
from engine.model.weights import WeightReader
from kernels.linear.formats import DenseWeight


def read_medusa(weights: WeightReader, spec: ModelSpec, *, max_model_len: int) -> ModelRecord:
    """The heads, whose linear layers are not packed yet."""
    heads, size = spec.draft_head, spec.hidden_size
    assert isinstance(heads, MedusaSpec), "read as such"
    ids = None
    if spec.vocab_size < spec.num_embeddings:
        ids = weights.stored(TOKEN_MAP, (spec.vocab_size,)).to(torch.int64)
    else:
        weights.discard(TOKEN_MAP)
    blocks = [
        [
            read_linear(weights, [f"blocks.{head}.layers.{layer}"], [size], size, heads.block_bias)
            for layer in range(heads.num_blocks)
        ]
        for head in range(heads.num_heads)
    ]
    own = 1 if heads.shares_projection else heads.num_heads
    for unused in range(own, heads.num_heads):
        weights.discard(projection_name(unused))
    embedding = torch.empty((0, size), dtype=weights.dtype)
    return ModelRecord(
        spec=spec,
        max_model_len=max_model_len,
        embedding=embedding,
        embedding_type=str(embedding.dtype).removeprefix("torch."),
        layers=[],
        draft_head=MedusaHeads(
            blocks=blocks,
            projections=[_projection(weights, number, spec, ids) for number in range(own)],
            target_ids=None if ids is None else checked_ids(weights, ids, spec, TOKEN_MAP),
        ),
    )


def _projection(weights: WeightReader, number: int, spec: ModelSpec, ids: Tensor | None) -> Linear:
    """What makes logits [V, E]; a file may hold those of all ids where only some are drawn."""
    name = projection_name(number)
    is_whole = ids is not None and weights.shape(name) == (spec.num_embeddings, spec.hidden_size)
    rows = weights.take(name, (spec.num_embeddings if is_whole else spec.vocab_size, spec.hidden_size))
    values = rows[ids] if ids is not None and is_whole else rows
    return Linear(weight=DenseWeight(values=values), inputs=spec.hidden_size)
