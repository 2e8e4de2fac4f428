"""What a model is, in plain data: everything that builds, plans and runs it reads this and never
`config.json`.

A family (`engine/model/families`) turns a checkpoint's `config.json` into a ModelSpec. No torch here, so that
a memory plan can be printed before anything is loaded.
"""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import msgspec

from engine.quantization.scheme import Scheme
from kernels.experts.routing import Routing
from runtime.errors import ConfigError

# The published models' norms inside latent attention use this, whatever config.json says of the outer ones.
INNER_NORM_EPS = 1e-6


class CheckpointError(ConfigError):
    """The checkpoint cannot be served; the message names the file and the key or tensor at fault."""


class TensorHeader(msgspec.Struct, frozen=True):
    """One stored tensor."""

    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding of one kind of layer. `parameters` holds the numbers of the scaling rule."""

    kind: str = "default"
    theta: float = 10_000.0
    # Dimensions of a head that are rotated: all of them, or the first part.
    rotary_dim: int
    # Context length that the checkpoint declares, in tokens.
    max_positions: int
    # Pairs are (2i, 2i+1) instead of (i, i + rotary_dim/2).
    interleaved: bool = False
    parameters: dict[str, float | bool | list[float] | None] = {}

    @property
    def usable_positions(self) -> int:
        """Context length that the rotation reaches, in tokens. YaRN stretches the original length by its
        factor, which transformers takes for what `max_position_embeddings` leaves unsaid.
        """
        if self.kind != "yarn":
            return self.max_positions
        original = self.parameters.get("original_max_position_embeddings") or self.max_positions
        return max(self.max_positions, self._stretched(original))

    @property
    def longest_positions(self) -> int:
        """The most that `engine.max_model_len` may ask for: the factor of linear and dynamic scaling may be
        contained in `max_position_embeddings` or not, which checkpoints do not say.
        """
        if self.kind in ("linear", "dynamic"):
            return self._stretched(self.max_positions)
        return self.usable_positions

    def _stretched(self, length: Any) -> int:
        factor = self.parameters.get("factor")
        # What is no number is refused by name where angles are computed.
        try:
            return int(length * max(1.0, cast("float", factor)))
        except (TypeError, ValueError, OverflowError):
            return self.max_positions


class LatentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one latent holds keys and values."""

    # 0 projects queries directly.
    query_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


class ExpertSpec(Routing, frozen=True, kw_only=True):
    """A sparse feed-forward layer: how its tokens choose experts, and what those are."""

    intermediate_size: int
    # Layers whose feed-forward is sparse.
    layers: tuple[int, ...]
    # A learned bias takes part in the choice, not in the weights.
    correction_bias: bool = False
    # Width of the feed-forward that every token passes; 0 is none.
    shared_intermediate_size: int = 0
    # Names of tensors: "separate" (gate_proj, up_proj, down_proj), "mixtral" (w1, w3, w2) or "gpt_oss".
    layout: Literal["separate", "mixtral", "gpt_oss"] = "separate"


# Bias of the logit of an id that is never drawn: finite, since logits that are not are an error, and beyond
# what temperatures, penalties and biases make up for. A cap leaves it (kernels/activation/activation.h).
NEVER_DRAWN = -1e9


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer."""

    # Its name in `architectures`, which `families.read_spec` adds.
    architecture: str = ""
    # Ids that are read and drawn: all that have a token. Those of them that have none are never drawn.
    vocab_size: int
    holes: tuple[int, ...] = ()
    # Rows of the embedding and of the head, of which the last ones may be padding.
    num_embeddings: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    # Longest context that the checkpoint declares, in tokens.
    max_positions: int
    # Element type of the checkpoint, for example "bfloat16".
    dtype: str
    # Every id that ends an answer, which `families.read_spec` finds.
    eos_token_ids: tuple[int, ...] = ()
    tied_embeddings: bool = False
    activation: Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu"] = "silu"
    # Which linear layers have biases.
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    # One rotation per kind of layer; `rope_of_layer` says which.
    ropes: tuple[RopeSpec, ...]
    rope_of_layer: tuple[int, ...]
    # Tokens that a layer's attention looks back on, itself included; None is all.
    windows: tuple[int | None, ...]
    # Attention scores are multiplied by this before the softmax.
    attention_scale: float
    attention_soft_cap: float | None = None
    # A learned score per head that takes part in the softmax and attends to nothing.
    attention_sinks: bool = False
    logit_soft_cap: float | None = None
    # Norms of queries and keys: per head, or over all heads together.
    qk_norm: Literal["none", "head", "full"] = "none"
    # "pre": before each half layer; "post": after it; "sandwich": both.
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    # Norm weights are stored as their distance from one.
    norm_offset: bool = False
    embedding_scale: float = 1.0
    # Whether q, k, v and gate, up are stored as one tensor each.
    fused_projections: bool = False
    latent: LatentSpec | None = None
    experts: ExpertSpec | None = None
    # How the checkpoint's linear layers are quantized; None where they are not.
    quantization: Scheme | None = None

    @property
    def window(self) -> int | None:
        """Tokens that the model looks back on; None when some layer looks at everything."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if windows and len(windows) == len(self.windows) else None

    @property
    def query_key_dim(self) -> int:
        """Size of a head's query and of a stored key (with latent attention: of key and value together)."""
        return self.latent.kv_rank + self.latent.rope_dim if self.latent else self.head_dim

    @property
    def cache_heads(self) -> int:
        """KV heads that are stored for each token."""
        return 1 if self.latent else self.num_kv_heads

    @property
    def cache_value_dim(self) -> int:
        """Elements of a stored value; 0 when the value is part of the key."""
        return 0 if self.latent else self.head_dim

    @property
    def value_dim(self) -> int:
        """Size of a head's attention output."""
        return self.latent.kv_rank if self.latent else self.head_dim

    @property
    def attention_balance(self) -> float:
        """Positions that a token looks back on in as many products as all its linear layers have. Layers
        with a window do not count, since theirs do not grow; nor does the head, which few tokens need.
        """
        num_full = sum(window is None for window in self.windows)
        looked_at = num_full * self.num_heads * (self.query_key_dim + self.value_dim)
        return sum(map(self._linear_products, range(self.num_layers))) / looked_at if num_full else math.inf

    def _linear_products(self, layer: int) -> int:
        experts, width = self.experts, self.intermediate_size
        if experts is not None and layer in experts.layers:
            width = experts.num_active * experts.intermediate_size + experts.shared_intermediate_size
        queries, values = self.num_heads * self.head_dim, 2 * self.cache_heads * self.query_key_dim
        return self.hidden_size * (2 * queries + values + 3 * width)


def yarn_magnitude(factor: float, coefficient: float = 1.0) -> float:
    """YaRN's attention magnitude (arXiv 2309.00071) for a context stretched `factor` times."""
    return 1.0 if factor <= 1 else 0.1 * coefficient * math.log(factor) + 1.0
