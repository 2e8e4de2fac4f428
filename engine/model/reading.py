"""Reads a checkpoint into a model's record, layer by layer, and packs what multiplies on the way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine.model.altup import read_ends
from engine.model.calibration import Calibration
from engine.model.checkpoint import LoadRequest
from engine.model.decoder import Decoder, read_layer
from engine.model.eagle3_reading import read_draft_head
from engine.model.layer_spec import DraftHeadSpec, MedusaSpec, PredictionSpec
from engine.model.layers import embedding_scale, read_norm
from engine.model.medusa_reading import read_medusa
from engine.model.mtp_reading import read_predictor
from engine.model.per_layer import read_table
from engine.model.pooled_heads import read_heads
from engine.model.records import Linear, ModelRecord, Norm
from engine.model.rope import query_scales, rope_table
from engine.model.spec import NEVER_DRAWN, CheckpointError, ModelSpec
from engine.model.weights import Progress, WeightReader
from engine.quantization.scheme import FLOAT_TYPES
from kernels.linear.native import NativePacker, packed_by
from kernels.linear.parts import pack_any
from kernels.selection import Kernels, torch_kernels

# What reads heads of a kind.
_HEADS: dict[type, Callable[..., ModelRecord]] = {
    DraftHeadSpec: read_draft_head,
    MedusaSpec: read_medusa,
    PredictionSpec: read_predictor,
}


class Packing(Protocol):
    """Makes of weights what multiplies while a model is loaded: no more than a layer is held twice."""

    # Whether float16 weights lose nothing by it; else they are rounded to the serving type.
    keeps_float16: bool

    def pack(self, linear: Linear) -> None:
        """Packs one linear layer."""


class NativePacking:
    """Weights of the native kernels; those that were read are let go."""

    def __init__(self, packer: NativePacker) -> None:
        self._packer = packer
        self.keeps_float16 = packer.keeps_float16

    def pack(self, linear: Linear) -> None:
        linear.weight = packed_by(self._packer.pack, linear.weight, linear.bias)
        linear.bias = linear.product = None


def _pack(linear: Linear, *, weights: WeightReader, packing: Packing | None) -> None:
    if packing is not None:
        packing.pack(linear)
        return
    # Which product serves a shape is found out while loading, not in the first step.
    linear.product = pack_any(weights.kernels.linear, linear.weight)
    # Some multiply by an order of their own.
    linear.weight = getattr(linear.product, "kept", linear.weight)


def _read_head_model(
    weights: WeightReader, spec: ModelSpec, *, max_model_len: int, packing: Packing | None
) -> ModelRecord:
    """A head that drafts, or heads."""
    record = _HEADS[type(spec.draft_head)](weights, spec, max_model_len=max_model_len)
    routed = (linear for layer in record.layers for linear in layer.routed_linears())
    for linear in (*record.linears(), *routed):
        _pack(linear, weights=weights, packing=packing)
    if record.head is not None:
        _pack(record.head, weights=weights, packing=packing)
    return record


def read_model(
    weights: WeightReader, spec: ModelSpec, *, max_model_len: int, packing: Packing | None
) -> ModelRecord:
    """The whole model, layer by layer."""
    pack = partial(_pack, weights=weights, packing=packing)
    shape = (spec.num_embeddings, spec.hidden_size)
    embedding = _read_embedding(weights, spec, shape)
    positions = _read_positions(weights, spec, max_model_len) if spec.learned_positions else None
    per_layer = None if spec.per_layer is None else read_table(weights, spec)
    ends = None if spec.altup is None else read_ends(weights, spec)
    calibration = None
    if weights.calibrates:
        calibration = Calibration(weights, spec, embedding, positions, max_model_len, per_layer, ends)
    layers = []
    for index in range(spec.num_layers):
        layer = read_layer(weights, index, spec)
        if calibration is not None:
            calibration.finish(layer)
        for linear in (*layer.linears(), *layer.routed_linears()):
            pack(linear)
        layers.append(layer)
    norm = read_norm(weights, "model.norm", spec.hidden_size, spec) if spec.final_norm else None
    head = None
    if spec.pooling is not None:
        for name in ("lm_head.weight", "lm_head.bias"):
            weights.discard(name)
    else:
        assert norm is not None, "what generates has one"
        head = _read_head(weights, spec, norm, embedding, shape)
    record = ModelRecord(
        spec=spec,
        max_model_len=max_model_len,
        embedding=embedding,
        embedding_type=str(embedding.dtype).removeprefix("torch."),
        embedding_scale=embedding_scale(spec, embedding.dtype),
        layers=layers,
        norm=norm,
        head=head,
        ropes=[
            (cos.to(weights.device), sin.to(weights.device))
            for cos, sin in (rope_table(rope, max_model_len * spec.num_position_rows) for rope in spec.ropes)
        ],
        query_scales=[
            None if scales is None else scales.to(weights.device)
            for scales in (query_scales(rope, max_model_len) for rope in spec.ropes)
        ],
        positions=positions,
        per_layer=per_layer,
        stream_ends=ends,
        embedding_norm=read_norm(weights, "model.embed_norm", spec.hidden_size, spec)
        if spec.embedding_norm
        else None,
        heads=read_heads(weights, spec),
    )
    if record.head is not None:
        pack(record.head)
    if per_layer is not None:
        pack(per_layer.projection)
    if ends is not None:
        for linear in (*ends.outward, *ends.inward):
            pack(linear)
    return record


def _read_embedding(weights: WeightReader, spec: ModelSpec, shape: tuple[int, int]) -> Tensor:
    """[V, E]; empty for a rank that neither embeds nor has a part of it as its head."""
    if not weights.shard.embeds(spec):
        return torch.empty((0, spec.hidden_size), dtype=weights.dtype, device=weights.device)
    embedding = weights.keep("model.embed_tokens.weight", shape)
    if spec.num_segments and not spec.learned_positions:
        # Where positions turn heads there is no table to tell texts apart by: all are the first.
        types = weights.take("model.embed_types.weight", (spec.num_segments, spec.hidden_size))
        embedding = embedding + types[0]
    return embedding


def _read_positions(weights: WeightReader, spec: ModelSpec, max_model_len: int) -> Tensor:
    shape = (spec.position_offset + spec.max_positions, spec.hidden_size)
    table = weights.keep("model.embed_positions.weight", shape, dtype=torch.float32)
    table = table[spec.position_offset :][:max_model_len]
    if not spec.num_segments:
        return table
    # A row for each position of each text of a pair.
    segments = weights.take(
        "model.embed_types.weight", (spec.num_segments, spec.hidden_size), dtype=torch.float32
    )
    return (segments[:, None] + table[None]).flatten(0, 1)


def _read_head(
    weights: WeightReader, spec: ModelSpec, norm: Norm, embedding: Tensor, shape: tuple[int, int]
) -> Linear:
    # The head is linear: what multiplies logits may multiply what it takes in.
    norm.weight = norm.weight * spec.logit_scale
    norm.bias = None if norm.bias is None else norm.bias * spec.logit_scale
    rows = weights.shard.vocabulary(spec.vocab_size)
    if spec.tied_embeddings:
        weights.discard("lm_head.weight")
        _refuse_other_head(weights, embedding[rows], rows)
        head = weights.tied_head("model.embed_tokens", shape, embedding, rows)
    else:
        head = weights.head("lm_head", shape, rows)
    bias = _head_bias(weights, spec)
    return Linear(weight=head, bias=None if bias is None else bias[rows])


def _refuse_other_head(weights: WeightReader, embedding: Tensor, rows: slice) -> None:
    """A head that is stored beside the embedding, which it is said to be, has to be the same: transformers
    would compute with the head.
    """
    name = "lm_head.weight"
    if weights.element_type(name) not in FLOAT_TYPES:
        return
    stored = weights.stored(name)
    part = stored[rows] if weights.shard.size == 1 else stored
    # Rows at a time, which a file that is mapped gives without a copy of the whole.
    steps = [slice(start, start + 4096) for start in range(0, len(embedding), 4096)]
    if part.shape != embedding.shape or not all(
        torch.equal(part[step].to(embedding.dtype), embedding[step]) for step in steps
    ):
        raise CheckpointError(
            f"{weights.folder}: {weights.headers[name].stored_name or name} is not the embedding, though "
            "config.json has tie_word_embeddings = true; set that to false to serve the head that is stored"
        )


def _head_bias(weights: WeightReader, spec: ModelSpec) -> Tensor | None:
    """The head's bias [V], which keeps ids without a token from being drawn; None where it has none."""
    bias = None
    if spec.head_bias:
        bias = weights.take("lm_head.bias", (spec.num_embeddings,))[: spec.vocab_size]
    if not spec.holes:
        return bias
    bias = (
        torch.zeros(spec.vocab_size, dtype=weights.dtype, device=weights.device)
        if bias is None
        else bias.clone()
    )
    bias[list(spec.holes)] = NEVER_DRAWN
    return bias


def read_checkpoint(
    request: LoadRequest,
    *,
    device: torch.device,
    progress: Progress,
    kernels: Kernels,
    packing: Packing | None = None,
) -> ModelRecord:
    """A checkpoint's model. `packing` says who multiplies: torch with `kernels`, unless it is given.

    Raises CheckpointError naming a tensor that is missing, misshapen or unexpected.
    """
    with WeightReader(
        request,
        device=device,
        progress=progress,
        kernels=kernels,
        is_packed=packing is not None,
        keeps_float16=packing is not None and packing.keeps_float16,
    ) as weights:
        read = read_model if request.spec.draft_head is None else _read_head_model
        record = read(weights, request.spec, max_model_len=request.max_model_len, packing=packing)
        weights.finish()
    return record


def load_decoder(
    request: LoadRequest, *, device: torch.device, progress: Progress, kernels: Kernels | None = None
) -> Decoder:
    """The same for torch."""
    kernels = kernels or torch_kernels()
    record = read_checkpoint(request, device=device, progress=progress, kernels=kernels)
    return Decoder(record, kernels)
