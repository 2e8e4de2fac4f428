"""What a model is, in plain data: everything that builds, plans and runs it reads this and never
`config.json`.

A family (`engine/model/families`) turns a checkpoint's `config.json` into a ModelSpec. No torch here, so that
a memory plan can be printed before anything is loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal, cast

import msgspec

from checkpoint.pooling import PoolingFiles
from engine.model.layer_spec import (
    AltUpSpec,
    CacheShape,
    DraftHeadSpec,
    IndexerSpec,
    LayerHeads,
    MedusaSpec,
    PerLayerSpec,
    PredictionSpec,
    SharedBlockSpec,
)
from engine.quantization.scheme import Scheme
from kernels.experts.routing import Routing
from kernels.recurrent.store import StateShape
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
    # What the file calls it, where that is not what layers ask for.
    stored_name: str = ""

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)


class TensorNames(msgspec.Struct, frozen=True, kw_only=True):
    """How a family's checkpoints name their tensors, where that is not as Llama's do."""

    # Patterns and what takes their place (as in re.sub), one after another.
    renamed: tuple[tuple[str, str], ...] = ()
    # Pattern of the beginning of names of what is not served: parts that see or hear, for example.
    skipped: str = ""

    def of(self, stored: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
        """The tensors that layers may ask for, by the names that they ask for."""
        renamed = [(re.compile(pattern), to) for pattern, to in self.renamed]
        skipped = re.compile(self.skipped) if self.skipped else None
        found = {}
        for name, header in stored.items():
            if skipped is not None and skipped.match(name):
                continue
            ours = name
            for pattern, to in renamed:
                ours = pattern.sub(to, ours)
            found[ours] = header if ours == name else msgspec.structs.replace(header, stored_name=name)
        return found


class QueryGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """Queries are multiplied by 1 + beta * log(1 + floor((position + offset) / length)), so that attention
    stays as sharp over long contexts (Llama 4, after arXiv 2501.19399).
    """

    beta: float
    length: int
    offset: int = 0


ROPE_KINDS = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")
"""Rules by which a rotation's frequencies are scaled; `engine.model.rope` computes them."""


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding of one kind of layer. `parameters` holds the numbers of the scaling rule."""

    kind: str = "default"
    theta: float = 10_000.0
    # Dimensions of a head that are rotated: all of them, the first part, or 0 for none.
    rotary_dim: int
    # Context length that the checkpoint declares, in tokens.
    max_positions: int
    # What may be asked for beyond it, where no layer knows a position; 0: as below.
    reachable_positions: int = 0
    # Pairs are (2i, 2i+1) instead of (i, i + rotary_dim/2).
    interleaved: bool = False
    # They turn the other way round.
    backwards: bool = False
    parameters: dict[str, float | bool | list[float] | None] = {}
    query_growth: QueryGrowth | None = None

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
        return max(self.usable_positions, self.reachable_positions)

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
    # Chooses the positions that are looked at; None: all are.
    indexer: IndexerSpec | None = None

    def indexer_of(self, layer: int) -> IndexerSpec | None:
        """That of a layer, if it has one."""
        indexer = self.indexer
        return None if indexer is None or layer in indexer.without else indexer


class StateSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that carry a state from token to token (kernels/recurrent): a short convolution alone, or in
    front of Mamba 2's scan (arXiv 2405.21060), the gated delta rule (arXiv 2412.06464) or a real-gated linear
    recurrent unit (RG-LRU, arXiv 2402.19427), or Mamba's selective scan (arXiv 2312.00752); or linear
    attention at fixed rates (arXiv 2401.04658), which is Mamba 2's scan with time steps of one, behind a
    convolution of one tap.
    """

    kind: Literal["convolution", "mamba2", "delta", "linear", "rg_lru", "selective"]
    layers: tuple[int, ...]
    # Inputs that a convolution takes, the token's own included, of so many channels.
    taps: int
    channels: int
    # Heads of values, and of queries and keys that they share; none with a convolution alone, one with a
    # selective scan. With RG-LRU those of gates, whose "values" are channels and whose "keys" are one.
    num_heads: int = 0
    num_groups: int = 0
    key_dim: int = 0
    value_dim: int = 0
    convolution_bias: bool = False
    bias: bool = False
    # How the delta rule's inputs are stored: all that belongs to a group together; part by part; or so, and
    # each in a tensor and with a convolution of its own.
    layout: Literal["by_group", "separate", "apart"] = "separate"
    # Limits of Mamba 2's time steps.
    step_limits: tuple[float, float] = (0.0, math.inf)
    # Rates by head of each of the layers, where they are not learned.
    rates: tuple[tuple[float, ...], ...] = ()
    # What the delta rule's gains reach.
    gain_scale: float = 1.0
    # Whether each channel of its keys has a decay of its own (Kimi Delta Attention, arXiv 2510.26692), whose
    # exponent may have a floor; and the elements between the two products that such decays and the gate, or a
    # selective scan's time steps, are made by (0: one makes each).
    channel_decays: bool = False
    decay_floor: float = 0.0
    low_rank: int = 0
    # Norms of what a selective scan's time steps are made of, of its keys and of its queries: with weights,
    # without, or none.
    selection_norm: Literal["learned", "plain", "none"] = "learned"
    # The norm behind a scan, over so many elements; 0 is none. Its gate comes before or after it.
    norm_size: int = 0
    gate_first: bool = False
    gate_kind: Literal["silu", "sigmoid"] = "silu"
    norm_eps: float = 0.0

    @property
    def num_decays(self) -> int:
        """Decays of a token: of heads, or of their keys' channels."""
        return self.num_heads * (self.key_dim if self.channel_decays else 1)

    @property
    def norm_spans(self) -> bool:
        """Whether a norm is over several heads."""
        return self.norm_size > self.value_dim

    @property
    def shape(self) -> StateShape:
        """What a sequence keeps in each of the layers."""
        return StateShape(
            taps=self.taps,
            channels=self.channels,
            num_heads=self.num_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
        )

    @property
    def num_bytes(self) -> int:
        """What a sequence keeps in all of the layers."""
        return len(self.layers) * self.shape.num_bytes


ExpertLayout = Literal["separate", "biased", "fused", "mixtral", "gpt_oss", "stacked", "inputs_first"]


class ExpertSpec(Routing, frozen=True, kw_only=True):
    """A sparse feed-forward layer: how its tokens choose experts, and what those are."""

    intermediate_size: int
    # Layers whose feed-forward is sparse.
    layers: tuple[int, ...]
    # A learned bias takes part in the choice, not in the weights; and whether checkpoints may have none.
    correction_bias: bool = False
    may_lack_correction: bool = False
    # Width of the feed-forward that every token passes; 0 is none.
    shared_intermediate_size: int = 0
    # Whether that is multiplied by the sigmoid of a gate of its own, one number for each token.
    shared_gate: bool = False
    # Whether it counts half, without any such gate.
    halves_shared: bool = False
    # Whether what both give is normed.
    output_norm: bool = False
    # Names of tensors: "separate" (gate_proj, up_proj, down_proj) or "mixtral" (w1, w3, w2); or all experts
    # in one tensor each: "stacked" (outputs first), "inputs_first", or "gpt_oss" (that, gate and up taking
    # turns, with biases).
    # "fused": two tensors for each, of which the first is gate_up_proj. "biased": as "separate", with biases.
    layout: ExpertLayout = "separate"
    # Elements of what experts take and give, a projection of the stream and back; 0: the stream's own.
    latent_size: int = 0
    # Experts are beside a dense feed-forward, each with norms of its own (Gemma 4); see `joined_experts`.
    joins_dense: bool = False


class WeightFactors(msgspec.Struct, frozen=True, kw_only=True):
    """What the rows of a linear layer are multiplied by when they are read."""

    # End of its name.
    name: str
    # (number of rows, factor), from the first on; 0 is all of them.
    parts: tuple[tuple[int, float], ...]


# Looks to the end of what the step computes; beyond any context, and far from what an int64 cannot count.
ALL_AHEAD = 1 << 40

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
    # These three are the largest, where layers differ.
    num_heads: int
    num_kv_heads: int
    head_dim: int
    # Attention layer by layer, and inner sizes of feed-forwards; empty where all layers have the same.
    layer_heads: tuple[LayerHeads, ...] = ()
    intermediate_sizes: tuple[int, ...] = ()
    # Gates of a layer count by what they are above their mean plus so many standard deviations; None: as they
    # are. Empty where all do.
    gate_cuts: tuple[float | None, ...] = ()
    norm_eps: float
    # Longest context that the checkpoint declares, in tokens.
    max_positions: int
    # Element type of the checkpoint, for example "bfloat16".
    dtype: str
    # Every id that ends an answer, which `families.read_spec` finds.
    eos_token_ids: tuple[int, ...] = ()
    tied_embeddings: bool = False
    activation: Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu", "relu", "relu2", "xielu"] = "silu"
    # Whether a feed-forward multiplies act(gate) by up; else it is act(up) alone.
    gated: bool = True
    # Which linear layers have biases.
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    # Of a feed-forward's last product, where the others have none.
    down_bias: bool = False
    head_bias: bool = False
    # A learned vector for each position is added to the embedding.
    learned_positions: bool = False
    # Rows of that table before the first position's.
    position_offset: int = 0
    # Texts of a pair that a learned vector each tells apart; 0: there are no such vectors.
    num_segments: int = 0
    # One rotation per kind of layer; `rope_of_layer` says which.
    ropes: tuple[RopeSpec, ...]
    rope_of_layer: tuple[int, ...]
    # Tokens that a layer's attention looks back on, itself included; None is all.
    windows: tuple[int | None, ...]
    # Tokens of the chunks that a layer's attention stays in; None, or empty for all: in none.
    chunks: tuple[int | None, ...] = ()
    # Whether it looks ahead as far as back: an encoder, whose texts are read in one step.
    bidirectional: bool = False
    # Attention scores are multiplied by this before the softmax.
    attention_scale: float
    attention_soft_cap: float | None = None
    # A learned score per head that takes part in the softmax and attends to nothing.
    attention_sinks: bool = False
    # Whether layers with a window alone have them.
    sinks_in_windows: bool = False
    logit_soft_cap: float | None = None
    logit_scale: float = 1.0
    # All norms: root-mean-square, or layer norms (those outside attention with biases or without).
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    # Whether those between half layers, and at the end, have weights.
    norm_weights: bool = True
    # Norms of queries and keys: per head, each head by weights of its own, over all heads together; or per
    # head without weights, in layers that rotate ("unit").
    qk_norm: Literal["none", "head", "each", "full", "unit"] = "none"
    # Whether those come after the rotation.
    qk_norm_last: bool = False
    # Whether values are normed per head, too, without weights; and what they are multiplied by.
    value_norm: bool = False
    value_scale: float = 1.0
    # "pre": before each half layer; "post": after it; "sandwich": both. "sum": of the stream after it, which
    # the norm takes the place of. "parallel": before each, and both take what the layer was given;
    # "parallel_shared": by one norm.
    norm_placement: Literal["pre", "post", "sandwich", "sum", "parallel", "parallel_shared"] = "pre"
    # Where that differs in layers with a state.
    state_norm_placement: Literal["pre"] | None = None
    # A norm of the embedding; and whether there is one behind the last layer, and before the first one's
    # attention.
    embedding_norm: bool = False
    final_norm: bool = True
    first_norm: bool = True
    # Norm weights are stored as their distance from one.
    norm_offset: bool = False
    # Whether each layer ends with a learned factor of the stream.
    layer_scalars: bool = False
    embedding_scale: float = 1.0
    # Whether that factor is rounded to the serving type, as it was in training.
    rounds_embedding_scale: bool = False
    # Whether q, k, v are stored as one tensor, and in which order: all of q first, or by heads of keys.
    fused_qkv: Literal["none", "whole", "by_head"] = "none"
    # Whether gate and up are, and whether up comes first.
    fused_gate_up: bool = False
    up_first: bool = False
    # Whether weights of linear layers are stored [inputs, outputs].
    inputs_first: bool = False
    names: TensorNames = TensorNames()
    per_layer: PerLayerSpec | None = None
    altup: AltUpSpec | None = None
    shared_block: SharedBlockSpec | None = None
    factors: tuple[WeightFactors, ...] = ()
    latent: LatentSpec | None = None
    experts: ExpertSpec | None = None
    state: StateSpec | None = None
    # Layers that attend, and that have a feed-forward; None is all. Others have a state, or no such half.
    attention_layers: tuple[int, ...] | None = None
    feed_forward_layers: tuple[int, ...] | None = None
    # A gate that attention is multiplied by: one for each element, stored behind each head's query, or in
    # another tensor; or one for each head, stored so.
    attention_gate: Literal["none", "by_head", "apart", "one_per_head"] = "none"
    attention_gate_kind: Literal["sigmoid", "softplus"] = "sigmoid"
    # How the checkpoint's linear layers are quantized; None where they are not.
    quantization: Scheme | None = None
    # How the model pools what it has read; None where it generates.
    pooling: PoolingFiles | None = None
    # A classifier's layers behind the pooling, by the names of their tensors: "bert", "roberta",
    # "modernbert" (see
    # `pooled_heads`) or "score".
    classifier: Literal["bert", "roberta", "modernbert", "score"] = "score"
    # Where its checkpoints may have a layer that drafts for it.
    prediction: PredictionSpec | None = None
    # Where it is no model but a head, or some, that draft for one.
    draft_head: DraftHeadSpec | MedusaSpec | PredictionSpec | None = None

    @property
    def norms_all_heads(self) -> bool:
        """Whether norms of queries and keys know of more than one head."""
        return self.qk_norm in ("full", "each")

    @property
    def attending(self) -> tuple[int, ...]:
        """Layers that store keys and values."""
        return tuple(range(self.num_layers)) if self.attention_layers is None else self.attention_layers

    @property
    def is_keyless(self) -> bool:
        """Whether no layer attends: states are all that sequences keep."""
        return not self.attending

    @property
    def feeding(self) -> tuple[int, ...]:
        """Layers with a feed-forward."""
        return tuple(range(self.num_layers)) if self.feed_forward_layers is None else self.feed_forward_layers

    @property
    def attention_windows(self) -> tuple[int | None, ...]:
        """Windows of these."""
        return tuple(self.windows[layer] for layer in self.attending)

    @property
    def window(self) -> int | None:
        """Tokens that the model looks back on; None when some layer looks at everything."""
        windows = [window for window in self.attention_windows if window is not None]
        return max(windows) if windows and len(windows) == len(self.attending) else None

    @property
    def sliding_layers(self) -> frozenset[int]:
        """Layers that store keys and values which no layer looks at beyond a window; none where all are such,
        or none is.
        """
        stored = {layer for layer in self.attending if self.cache_source(layer) == layer}
        endless = {self.cache_source(layer) for layer in self.attending if not self.reach_of(layer)}
        return frozenset(stored - endless) if endless and not self.bidirectional else frozenset()

    @property
    def sliding_reach(self) -> int:
        """Tokens that layers look back on in what those store, the own included; 0 where there are none."""
        found = self.sliding_layers
        readers = (layer for layer in self.attending if self.cache_source(layer) in found)
        return max(map(self.reach_of, readers), default=0)

    def heads_of(self, layer: int) -> LayerHeads:
        """Sizes of a layer's attention."""
        if self.layer_heads:
            return self.layer_heads[layer]
        return LayerHeads(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            value_dim=self.head_dim,
            num_heads=self.num_heads,
        )

    def reach_of(self, layer: int) -> int:
        """Tokens that a layer's attention looks back on at most; 0 is all."""
        return self.windows[layer] or (self.chunks[layer] if self.chunks else None) or 0

    def ahead(self, layer: int) -> int:
        """Tokens behind its own that a layer's attention looks at."""
        if not self.bidirectional:
            return 0
        window = self.windows[layer]
        return ALL_AHEAD if window is None else window - 1

    def intermediate_size_of(self, layer: int) -> int:
        """Inner elements of a layer's dense feed-forward."""
        return self.intermediate_sizes[layer] if self.intermediate_sizes else self.intermediate_size

    @property
    def shares_prefixes(self) -> bool:
        """Whether a prompt may begin with what was computed for another one: where every position is pooled,
        all of them are wanted.
        """
        return self.pooling is None or (self.pooling.kind == "last" and not self.bidirectional)

    @property
    def num_position_rows(self) -> int:
        """Rows of learned positions for each of those that there are: one of each text of a pair."""
        return max(1, self.num_segments) if self.learned_positions else 1

    @property
    def query_key_dim(self) -> int:
        """Size of a head's query and of a stored key (with latent attention: of key and value together)."""
        return self.latent.kv_rank + self.latent.rope_dim if self.latent else self.head_dim

    def cache_source(self, layer: int) -> int:
        """The layer in whose memory a layer's keys and values lie: its own, or that of another one that wrote
        them. Layers of an encoder write to the same place, since nothing is of use beyond the layer.
        """
        source = 0 if self.bidirectional else self.heads_of(layer).cache_of
        return layer if source is None else source

    def cache_shape(self, layer: int) -> CacheShape | None:
        """What a layer stores of each token; None where it has no memory of its own."""
        heads = self.heads_of(layer)
        if layer not in self.attending or self.cache_source(layer) != layer:
            return None
        if self.latent:
            indexer = self.latent.indexer_of(layer)
            return CacheShape(
                num_heads=1,
                key_dim=self.query_key_dim,
                # The key holds the value, and an indexer's key lies in its place.
                value_dim=0 if indexer is None else indexer.head_dim,
                shared_value_dim=self.latent.kv_rank,
            )
        return CacheShape(
            num_heads=heads.num_kv_heads,
            key_dim=heads.head_dim,
            value_dim=heads.value_dim,
            shared_value_dim=heads.value_dim,
        )

    @property
    def cache_shapes(self) -> tuple[CacheShape, ...]:
        """Those of all layers that store something."""
        shapes = map(self.cache_shape, range(self.num_layers))
        return tuple(shape for shape in shapes if shape is not None)

    @property
    def cache_heads(self) -> int:
        """KV heads that a layer attends to; the most where layers differ."""
        return max((shape.num_heads for shape in self.cache_shapes), default=0)

    @property
    def value_dim(self) -> int:
        """Size of a head's attention output; the largest where layers differ."""
        if self.latent:
            return self.latent.kv_rank
        return max(heads.value_dim for heads in self.layer_heads) if self.layer_heads else self.head_dim

    @property
    def attention_balance(self) -> float:
        """Positions that a token looks back on in as many products as all its linear layers have. Layers
        with a window do not count, since theirs do not grow; nor does the head, which few tokens need.
        """
        each = [self.heads_of(layer) for layer in self.attending if not self.reach_of(layer)]
        looked_at = sum(heads.num_heads * (heads.head_dim + heads.value_dim) for heads in each)
        if self.latent:
            looked_at = len(each) * self.num_heads * (self.query_key_dim + self.value_dim)
        return sum(map(self._linear_products, range(self.num_layers))) / looked_at if each else math.inf

    def _linear_products(self, layer: int) -> int:
        experts, width = self.experts, self.intermediate_size_of(layer)
        if experts is not None and layer in experts.layers:
            active = experts.num_active * experts.intermediate_size + experts.shared_intermediate_size
            width = active + (width if experts.joins_dense else 0)
        heads, stored = self.heads_of(layer), self.cache_shape(layer)
        queries = heads.num_heads * (heads.head_dim + heads.value_dim)
        stores = 0
        if stored is not None:
            stores = stored.num_heads * (
                stored.key_dim + (stored.key_dim if self.latent else stored.value_dim)
            )
        return self.hidden_size * (queries + stores + (3 if self.gated else 2) * width)


def yarn_magnitude(factor: float, coefficient: float = 1.0) -> float:
    """YaRN's attention magnitude (arXiv 2309.00071) for a context stretched `factor` times."""
    return 1.0 if factor <= 1 else 0.1 * coefficient * math.log(factor) + 1.0
