"""What a layer has of its own in models whose layers differ, as part of a ModelSpec. No torch here."""

from __future__ import annotations

import msgspec


class LayerHeads(msgspec.Struct, frozen=True, kw_only=True):
    """The attention of one layer."""

    num_kv_heads: int
    # Elements of a head's query and key, and of its value.
    head_dim: int
    value_dim: int
    # Of queries.
    num_heads: int
    # Whether values are the keys, as they are before norm and rotation.
    values_of_keys: bool = False
    # The layer before this one whose keys and values are read; None: the layer stores its own.
    cache_of: int | None = None


class CacheShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a layer stores of each token."""

    num_heads: int
    key_dim: int
    # 0 when the value is part of the key.
    value_dim: int
    # Size of that part; else of a value.
    shared_value_dim: int

    @property
    def elements(self) -> int:
        """Numbers of a token."""
        return self.num_heads * (self.key_dim + self.value_dim)


class PerLayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A second embedding, which is not read once but by every layer (Gemma 3n): each gates its own part of a
    token's row by what the token has become, and adds that, projected and normed.
    """

    # Rows of the table; later ids take the first.
    num_embeddings: int
    # Elements that each layer reads.
    width: int


class DraftHeadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What makes one layer a head that drafts for another model (EAGLE-3, arXiv 2503.01840)."""

    # Hidden size of that model, and the layers of it whose inputs are read: its number of layers is what the
    # last one leaves. Empty: as in `layers_of`.
    target_size: int
    layers: tuple[int, ...]
    # Whether the stream begins with the normed hidden state.
    norm_before_residual: bool

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The layers of a model of so many; those that heads are trained on where they do not say."""
        return self.layers or (2, num_layers // 2, num_layers - 3)


class MedusaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What makes heads that draft for another model of one that has no layers (Medusa, arXiv 2401.10774)."""

    # Hidden size of that model, which is theirs.
    target_size: int
    num_heads: int
    # Products of each head in front of the one that makes logits.
    num_blocks: int
    block_bias: bool
    # Whether all heads make logits by the same weight.
    shares_projection: bool

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """As of DraftHeadSpec: what the last layer leaves."""
        return (num_layers,)


class PredictionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A layer that predicts the token behind the next one (MTP: DeepSeek-V3, arXiv 2412.19437): of a model
    that has one, how its tensors are found; of the head that it is read as, what it is.
    """

    # Hidden size of the model.
    target_size: int
    # Pattern of the beginning of their names, and what these become (as in TensorNames); see `mtp`.
    own: str
    renamed: tuple[tuple[str, str], ...]
    # Whether the product takes the hidden state first, and then the embedding.
    hidden_first: bool = False
    # Whether it lies in the model's own checkpoint, and not in one of its own.
    is_own: bool = True

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """As of DraftHeadSpec: what the last layer leaves."""
        return (num_layers,)


def prediction_names(own: str) -> tuple[tuple[str, str], ...]:
    """What becomes of the names that such a layer's tensors have in MiMo and in the `speculators` format;
    `own` is the pattern of their beginning.
    """
    return (
        (rf"^{own}token_layernorm\.", "model.enorm."),
        (rf"^{own}hidden_layernorm\.", "model.hnorm."),
        (rf"^{own}input_proj\.", "model.eh_proj."),
        (rf"^{own}final_layernorm\.", "model.norm."),
        (rf"^{own}", "model.layers.0."),
    )


# What a layer reads of a token is the sum of two numbers of the same spread.
SUM_SCALE = 2.0**-0.5


class AltUpSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Several streams of which each layer computes one, and a product of low rank beside its attention
    (Gemma 3n).
    """

    num_streams: int
    # Which of them layers compute.
    active: int
    # Whether what per-layer inputs are gated by is multiplied by a learned vector.
    scales_active: bool
    # Inner size of the product beside attention (LAuReL, arXiv 2411.07501).
    laurel_rank: int


class SharedBlockSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of attention and feed-forward that layers share (Zamba2, arXiv 2411.15242)."""

    # The layers that use them, which take turns.
    layers: tuple[int, ...]
    num_blocks: int
    # Of the products that a use adds to the block's: those of its feed-forward, and perhaps of its attention.
    rank: int
    adapts_attention: bool


class IndexerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What chooses the positions that latent attention looks at (DeepSeek-V3.2, arXiv 2512.02556)."""

    num_heads: int
    head_dim: int
    num_chosen: int
    # As of RopeSpec, of its queries and keys.
    interleaved: bool = False
    # Layers that have none, and look at what the last one before them has chosen.
    without: tuple[int, ...] = ()
