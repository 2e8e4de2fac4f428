"""Reads a head that drafts into a model's record; see `eagle3`.

Shape letters: E hidden size of the head, F of its target, V ids that it draws.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.model.eagle3 import EMBEDDING, NUM_STATES
from engine.model.layer_spec import DraftHeadSpec
from engine.model.layers import read_feed_forward, read_linear, read_norm
from engine.model.records import Attention, DraftHead, Layer, Linear, ModelRecord
from engine.model.rope import rope_table
from engine.model.spec import CheckpointError, ModelSpec
from engine.model.weights import WeightReader
from kernels.attention.ragged import AttentionOptions
from kernels.linear.formats import DenseWeight

_LAYER = "model.layers.0"


def read_draft_head(weights: WeightReader, spec: ModelSpec, *, max_model_len: int) -> ModelRecord:
    """The head, whose linear layers are not packed yet."""
    assert isinstance(spec.draft_head, DraftHeadSpec), "read as a head"
    embedding = torch.empty((0, spec.hidden_size), dtype=weights.dtype)
    if weights.has(EMBEDDING):
        embedding = weights.keep(EMBEDDING, (spec.num_embeddings, spec.hidden_size))
    token_qkv, attention = _read_attention(weights, spec)
    layer = Layer(
        attention=attention,
        feed_forward=read_feed_forward(weights, f"{_LAYER}.mlp", spec, spec.intermediate_size),
        before=[
            read_norm(weights, f"{_LAYER}.{name}", spec.hidden_size, spec)
            for name in ("input_layernorm", "post_attention_layernorm")
        ],
        after=[None, None],
    )
    size = spec.draft_head.target_size
    fused = weights.take("model.fc.weight", (spec.hidden_size, NUM_STATES * size))
    head = weights.head("lm_head", (spec.vocab_size, spec.hidden_size), slice(spec.vocab_size))
    return ModelRecord(
        spec=spec,
        max_model_len=max_model_len,
        embedding=embedding,
        embedding_type=str(embedding.dtype).removeprefix("torch."),
        layers=[layer],
        norm=read_norm(weights, "model.norm", spec.hidden_size, spec),
        head=Linear(weight=head),
        ropes=[rope_table(spec.ropes[0], max_model_len)],
        query_scales=[None],
        draft_head=DraftHead(
            fusion=[_product(part) for part in torch.split(fused, size, dim=1)],
            hidden_norm=read_norm(weights, f"{_LAYER}.hidden_norm", spec.hidden_size, spec),
            token_qkv=token_qkv,
            target_ids=_read_ids(weights, spec),
        ),
    )


def _read_attention(weights: WeightReader, spec: ModelSpec) -> tuple[Linear, Attention]:
    """What takes the embedding, and the attention, whose own product takes the hidden state."""
    keys = spec.num_kv_heads * spec.head_dim
    sizes = [spec.num_heads * spec.head_dim, keys, keys]
    names = [f"{_LAYER}.self_attn.{part}_proj" for part in "qkv"]
    pairs = list(zip(names, sizes, strict=True))
    inputs = spec.hidden_size
    joined = torch.cat([weights.take(f"{name}.weight", (size, 2 * inputs)) for name, size in pairs])
    token_qkv = _product(joined[:, :inputs])
    if spec.qkv_bias:
        token_qkv.bias = torch.cat([weights.take(f"{name}.bias", (size,)) for name, size in pairs])
    attention = Attention(
        qkv=_product(joined[:, inputs:]),
        output=read_linear(weights, [f"{_LAYER}.self_attn.o_proj"], [inputs], sizes[0], spec.output_bias),
        sizes=sizes,
        mixed_size=sizes[0],
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        options=AttentionOptions(scale=spec.attention_scale),
        rope=0,
        interleaved=False,
    )
    return token_qkv, attention


def _product(part: Tensor) -> Linear:
    return Linear(weight=DenseWeight(values=part.contiguous()), inputs=part.shape[1])


def _read_ids(weights: WeightReader, spec: ModelSpec) -> NDArray[np.int64] | None:
    """The target's ids of those that are drawn, as an array; None where both are the same."""
    if weights.has("model.t2d"):
        # The same from the other side.
        weights.stored("model.t2d")
    if not weights.has("model.d2t"):
        if spec.vocab_size != spec.num_embeddings:
            raise CheckpointError(
                f"{weights.folder}: tensor d2t is missing, which says what {spec.vocab_size} of the "
                f"{spec.num_embeddings} tokens of the model are drawn"
            )
        return None
    ids = weights.stored("model.d2t", (spec.vocab_size,)).to(torch.int64) + torch.arange(spec.vocab_size)
    return checked_ids(weights, ids, spec, "d2t")


def checked_ids(weights: WeightReader, ids: Tensor, spec: ModelSpec, name: str) -> NDArray[np.int64] | None:
    """The target's ids [V] that a tensor names, as an array; None where they are all, in order. Raises
    CheckpointError for what are none.
    """
    if not bool(((ids >= 0) & (ids < spec.num_embeddings)).all()):
        raise CheckpointError(
            f"{weights.folder}: tensor {name} leads beyond the {spec.num_embeddings} tokens of vocab_size"
        )
    if spec.vocab_size == spec.num_embeddings and bool((ids == torch.arange(ids.numel())).all()):
        return None
    found: NDArray[np.int64] = ids.numpy()
    return found
