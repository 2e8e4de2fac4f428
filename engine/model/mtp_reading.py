"""Reads a layer that predicts further tokens into a record of its own; see `mtp`.

Shape letters: E hidden size.
"""

from __future__ import annotations

import torch

from engine.model.decoder import read_layer
from engine.model.layer_spec import PredictionSpec
from engine.model.layers import embedding_scale, read_norm
from engine.model.mtp import HIDDEN_NORM, PRODUCT, TOKEN_NORM
from engine.model.records import Linear, ModelRecord, Predictor
from engine.model.rope import query_scales, rope_table
from engine.model.spec import ModelSpec
from engine.model.weights import WeightReader
from kernels.linear.formats import DenseWeight


def read_predictor(weights: WeightReader, spec: ModelSpec, *, max_model_len: int) -> ModelRecord:
    """The layer, whose products are not packed yet; embedding and head are left to its target."""
    assert isinstance(spec.draft_head, PredictionSpec), "read as such"
    size, embedding = spec.hidden_size, torch.empty((0, spec.hidden_size), dtype=weights.dtype)
    # Its halves are multiplied each for itself, so it is taken apart, whatever it is stored in.
    joined = weights.dense(PRODUCT, (size, 2 * size), dtype=weights.dtype)
    parts = [
        Linear(weight=weights.quantized(DenseWeight(values=part.contiguous())), inputs=size)
        for part in torch.split(joined, size, dim=1)
    ]
    hidden, token = parts if spec.draft_head.hidden_first else reversed(parts)
    return ModelRecord(
        spec=spec,
        max_model_len=max_model_len,
        embedding=embedding,
        embedding_type=str(embedding.dtype).removeprefix("torch."),
        embedding_scale=embedding_scale(spec, embedding.dtype),
        layers=[read_layer(weights, 0, spec)],
        norm=read_norm(weights, "model.norm", size, spec),
        ropes=[rope_table(rope, max_model_len) for rope in spec.ropes],
        query_scales=[query_scales(rope, max_model_len) for rope in spec.ropes],
        draft_head=Predictor(
            token_norm=read_norm(weights, TOKEN_NORM, size, spec),
            hidden_norm=read_norm(weights, HIDDEN_NORM, size, spec),
            token=token,
            hidden=hidden,
        ),
    )
