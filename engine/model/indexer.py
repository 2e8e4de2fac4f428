"""The indexer of DeepSeek-V3.2's sparse attention (arXiv 2512.02556): few heads and no values say of each
position how much it matters to a query. Its keys are rotated and stored beside the latents.

The published code multiplies queries and keys by a Hadamard matrix and rounds them to fp8 before it scores
them: the former changes no product, the latter is left out here, as transformers does.

Shape letters: T tokens, E hidden size, R rank of queries, I heads of the indexer, J their dim.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.model.layers import StepContext, multiply, normed, read_floats, read_linear
from engine.model.records import Indexer, Norm
from engine.model.spec import INNER_NORM_EPS, ModelSpec
from engine.model.weights import WeightReader
from kernels.attention.backends import BACKENDS
from kernels.attention.indexed import IndexedAttention, IndexQueries
from kernels.attention.mixed import for_heads
from kernels.rope.reference import rotate


def read_indexer(weights: WeightReader, prefix: str, spec: ModelSpec) -> Indexer:
    """The indexer of that name."""
    latent, hidden = spec.latent, spec.hidden_size
    assert latent is not None, "called for latent attention only"
    given = latent.indexer
    assert given is not None, "called where there is one"
    norm, dim = f"{prefix}.k_norm", given.head_dim
    return Indexer(
        query_up=read_linear(weights, [f"{prefix}.wq_b"], [given.num_heads * dim], latent.query_rank, False),
        key=read_linear(weights, [f"{prefix}.wk"], [dim], hidden, False),
        key_norm=Norm(
            weight=read_floats(weights, f"{norm}.weight", dim),
            bias=read_floats(weights, f"{norm}.bias", dim),
            eps=INNER_NORM_EPS,
            centered=True,
        ),
        weights=read_linear(weights, [f"{prefix}.weights_proj"], [given.num_heads], hidden, False),
        num_heads=given.num_heads,
        num_chosen=given.num_chosen,
        interleaved=given.interleaved,
    )


def ask(
    indexer: Indexer, x: Tensor, latent: Tensor, rotation: tuple[Tensor, Tensor], step: StepContext
) -> tuple[IndexQueries, Tensor]:
    """x [T, E] and the latent queries [T, R] -> what the indexer asks, and its keys [T, 1, J]."""
    cos, sin = rotation
    keys = normed(indexer.key_norm, multiply(indexer.key, x, step.adapters), step.kernels)[:, None]
    queries = multiply(indexer.query_up, latent, step.adapters).view(x.shape[0], indexer.num_heads, -1)
    scale = (indexer.num_heads * queries.shape[-1]) ** -0.5
    asked = IndexQueries(
        queries=rotate(queries, cos, sin, interleaved=indexer.interleaved),
        weights=multiply(indexer.weights, x, step.adapters).float() * scale,
        num_chosen=indexer.num_chosen,
    )
    return asked, rotate(keys, cos, sin, interleaved=indexer.interleaved)


def torch_attention(spec: ModelSpec, kind: type[Any] = BACKENDS["torch"]) -> Any:
    """The back end `kind` for a model's layers; for those with an indexer the one that there is."""
    if spec.latent is not None and spec.latent.indexer is not None:
        return IndexedAttention(num_heads=spec.num_heads)
    if spec.latent is not None:
        return for_heads(kind, [(spec.num_heads, 1)])
    # Where no layer attends, nobody asks the one that is made.
    each = map(spec.heads_of, spec.attending or (0,))
    return for_heads(kind, [(heads.num_heads, heads.num_kv_heads) for heads in each])
