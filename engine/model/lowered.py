"""A loaded model as the native kernels take it: packed weights and plain arrays, without torch.

`lower` makes one of a decoder; `loader` carries one from the process that loads to the one that serves.

Shape letters: E hidden size, V vocabulary, L positions, R rotated dimensions of a head, H query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.kernels.attention.ragged import AttentionOptions
from engine.kernels.linear.packed import PackedWeight
from engine.model.spec import ExpertSpec, LatentSpec, ModelSpec

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class LoweredNorm:
    """A root-mean-square norm: its weight [E]."""

    weight: Floats
    eps: float


@dataclass(frozen=True, kw_only=True)
class LoweredAttention:
    """Grouped-query attention; see `layers.Attention`."""

    qkv: PackedWeight
    output: PackedWeight
    sizes: Sequence[int]
    num_heads: int
    num_kv_heads: int
    options: AttentionOptions
    # Index of its table of angles.
    rope: int
    interleaved: bool
    qk_norm: str
    q_norm: Floats | None
    k_norm: Floats | None
    sinks: Floats | None  # [H]


@dataclass(frozen=True, kw_only=True)
class LoweredLatentAttention:
    """Attention over latents; see `latent_attention.LatentAttention`."""

    query_down: PackedWeight | None
    query_norm: Floats | None
    query_up: PackedWeight
    down: PackedWeight
    latent_norm: Floats
    key_up: Floats  # [H, N, rank]
    value_up: Floats  # [H, rank, V]
    output: PackedWeight
    num_heads: int
    latent: LatentSpec
    options: AttentionOptions
    rope: int
    interleaved: bool


@dataclass(frozen=True, kw_only=True)
class LoweredFeedForward:
    """act(gate) * up, then down."""

    gate_up: PackedWeight
    down: PackedWeight
    activation: str


@dataclass(frozen=True, kw_only=True)
class LoweredSparseFeedForward:
    """Router, experts, and perhaps a shared feed-forward that every token passes."""

    spec: ExpertSpec
    router: PackedWeight
    correction: Floats | None
    gate_up: Sequence[PackedWeight]
    down: Sequence[PackedWeight]
    activation: str
    shared: LoweredFeedForward | None

    def __post_init__(self) -> None:
        assert len(self.gate_up) == len(self.down) == self.spec.num_experts, "weights of every expert"


@dataclass(frozen=True, kw_only=True)
class LoweredLayer:
    """Attention and feed-forward, and the norms before and after each of them."""

    attention: LoweredAttention | LoweredLatentAttention
    feed_forward: LoweredFeedForward | LoweredSparseFeedForward
    before: Sequence[LoweredNorm | None]
    after: Sequence[LoweredNorm | None]


@dataclass(frozen=True, kw_only=True)
class LoweredModel:
    """Everything that a native program points to."""

    spec: ModelSpec
    max_model_len: int
    embedding: NDArray[Any]  # [V, E], the bits of `embedding_type`
    embedding_type: str
    # As that type rounds it.
    embedding_scale: float
    layers: Sequence[LoweredLayer]
    norm: LoweredNorm
    head: PackedWeight
    ropes: Sequence[tuple[Floats, Floats]]  # cos and sin [L, R/2]

    def weight_bytes(self) -> int:
        """Bytes of packed weights, absorbed projections, embedding table and tables of angles."""
        absorbed = sum(
            layer.attention.key_up.nbytes + layer.attention.value_up.nbytes
            for layer in self.layers
            if isinstance(layer.attention, LoweredLatentAttention)
        )
        tables = sum(part.nbytes for rope in self.ropes for part in rope)
        return self.head.arena.num_bytes() + self.embedding.nbytes + absorbed + tables
