"""What is read from a checkpoint: a model as records of plain fields, described once for all that compute it.

Weights of linear layers are dense or quantized (`kernels/linear/formats`) where torch multiplies, packed
where the native kernels do. Everything else is tensors to the one and arrays to the other (`host_arrays`):
who serves natively holds these records without torch, and `loader` carries them from process to process.

Shape letters: E hidden size, V vocabulary, L positions, R rotated dimensions of a head, H query heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.model.spec import ExpertSpec, LatentSpec, ModelSpec, StateSpec
from kernels.attention.ragged import AttentionOptions
from kernels.host import Values
from kernels.linear.packed import PackedWeight

Floats = NDArray[np.float32]


class LinearCut(msgspec.Struct, frozen=True):
    """Some of the `size` outputs (axis 0) or inputs (axis 1) of a linear layer: runs [begin, end) one behind
    another.
    """

    axis: int
    runs: tuple[tuple[int, int], ...]
    size: int


@dataclass(kw_only=True)
class Linear:
    """x W^T + b [outputs, inputs]; several tensors of the checkpoint may be stacked into one."""

    # A WeightFormat or PartedWeight; or, with the bias, a PackedWeight or a tuple of them side by side.
    weight: Any
    bias: Any = None
    # The weight as torch multiplies with it, made when it is packed for torch.
    product: Any = None
    # Adapters find the layer by its number of inputs and by (name, outputs) of each tensor that was stacked
    # in it; empty where the layer takes no adapters.
    inputs: int = 0
    parts: Sequence[tuple[str, int]] = ()
    # What of each of these tensors a rank of several has.
    cuts: Sequence[LinearCut | None] = ()
    # Changes that loaded adapters make to the product: NativeChanges or TorchChanges (kernels/adapters).
    changes: Any = None

    @property
    def packed(self) -> PackedWeight:
        """The weight as the native kernels take it, of one form."""
        assert isinstance(self.weight, PackedWeight), "packed while it was loaded"
        return self.weight

    @property
    def packed_parts(self) -> tuple[PackedWeight, ...]:
        """The same of one form or of several."""
        return self.weight if isinstance(self.weight, tuple) else (self.packed,)


@dataclass(kw_only=True)
class Norm:
    """A root-mean-square norm, or a layer norm, which is `centered`: its weight [E] in float32. Norms of
    queries and keys may have weights [H, D].
    """

    weight: Values
    eps: float
    bias: Values | None = None
    centered: bool = False


@dataclass(kw_only=True)
class Attention:
    """Grouped-query attention with rotary positions over the paged cache."""

    qkv: Linear
    output: Linear
    # Outputs of q, k and v, of which those are 0 that there are no products for; and what `output` takes.
    sizes: Sequence[int]
    mixed_size: int
    num_heads: int
    num_kv_heads: int
    options: AttentionOptions
    # Index of its table of angles.
    rope: int
    interleaved: bool
    # Norm of queries and keys: "none", per "head", or over all heads together ("full").
    qk_norm: str = "none"
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    # Whether these come after the rotation.
    norm_last: bool = False
    # Norm of values, which has no learned weights.
    v_norm: Norm | None = None
    sinks: Values | None = None  # [H]
    # What plain values are multiplied by.
    value_scale: float = 1.0
    # Gates that `qkv` gives, too, behind the values: one for each element that `output` takes, or each head.
    num_gates: int = 0
    gate_kind: str = "sigmoid"

    @property
    def stores(self) -> bool:
        """Whether it writes keys and values; else it reads those of another layer."""
        return self.sizes[1] > 0

    @property
    def value_kind(self) -> str:
        """What its values are: "plain", "normed", or keys that are normed ("of_keys")."""
        if self.v_norm is None:
            return "plain"
        return "normed" if self.sizes[2] else "of_keys"

    @property
    def entry(self) -> Linear:
        """The only one that the layer's input goes to."""
        return self.qkv


@dataclass(kw_only=True)
class Indexer:
    """Chooses the positions that latent attention looks at; see `indexer`."""

    query_up: Linear
    key: Linear
    key_norm: Norm
    weights: Linear  # one number for each of its heads
    num_heads: int
    num_chosen: int
    interleaved: bool


@dataclass(kw_only=True)
class LatentAttention:
    """Attention over latents, in the absorbed form; see `latent_attention`."""

    query_down: Linear | None
    query_norm: Values | None
    query_up: Linear
    down: Linear
    latent_norm: Values
    key_up: Values  # [H, N, rank]
    value_up: Values  # [H, rank, V]
    output: Linear
    num_heads: int
    latent: LatentSpec
    options: AttentionOptions
    rope: int
    interleaved: bool
    indexer: Indexer | None = None
    # The sigmoids of its outputs, one for each head, multiply what heads give.
    gate: Linear | None = None

    # Its input goes to two products.
    entry = None


@dataclass(kw_only=True)
class ShortConvolution:
    """Two gates and the channels between them: gate (x) convolution (gate (x) channels)."""

    inner: Linear
    weight: Values  # [W, C]
    bias: Values | None
    output: Linear

    @property
    def entry(self) -> Linear:
        """The only one that the layer's input goes to."""
        return self.inner


@dataclass(frozen=True, kw_only=True)
class StatePlaces:
    """First elements of the parts of a recurrence's projection, and of those of its channels."""

    channels: int
    gate: int
    decays: int
    # The delta rule's.
    gains: int = 0
    queries: int = 0
    keys: int = 0
    values: int = 0


@dataclass(kw_only=True)
class Recurrence:
    """A convolution, a scan over its channels, a gated norm. Its one projection gives channels, gate, decays
    and gains; the channels are queries, keys and values. Where a further product makes gate or decays, the
    projection gives what that takes.
    """

    spec: StateSpec
    inner: Linear
    places: StatePlaces
    weight: Values  # [W, C]
    bias: Values | None
    rate: Values  # [H], negative
    step_bias: Values  # [H], or [H, K] of decays by channel
    skip: Values | None  # [H]
    norm: Values | None
    output: Linear
    gate_up: Linear | None = None
    decay_up: Linear | None = None

    @property
    def entry(self) -> Linear:
        """The only one that the layer's input goes to."""
        return self.inner


@dataclass(kw_only=True)
class RecurrentUnit:
    """A convolution, a real-gated linear recurrent unit over its channels, times an activated gate. Its one
    projection gives channels and gate.
    """

    inner: Linear
    weight: Values  # [W, C]
    bias: Values | None
    gates: Values  # [H, D, 2 D], of what is taken in and of the recurrence
    gate_bias: Values  # [H, 2 D]
    rate: Values  # [C], negative
    output: Linear

    @property
    def entry(self) -> Linear:
        """The only one that the layer's input goes to."""
        return self.inner


@dataclass(kw_only=True)
class SelectiveUnit:
    """A convolution, a selective scan over its channels, times an activated gate. Its one projection gives
    channels and gate; a product of the channels what makes time steps, keys and queries, perhaps normed.
    """

    spec: StateSpec
    inner: Linear
    weight: Values  # [W, C]
    bias: Values | None
    selection: Linear
    norms: Sequence[Values]  # of the three, or none
    steps: Linear
    rate: Values  # [K, C], negative
    skip: Values  # [C]
    output: Linear

    @property
    def entry(self) -> Linear:
        """The only one that the layer's input goes to."""
        return self.inner


@dataclass(kw_only=True)
class JointMixer:
    """Attention and a recurrence side by side."""

    attention: Attention
    recurrence: Recurrence

    # Its input goes to two products.
    entry = None


@dataclass(kw_only=True)
class SharedUse:
    """A use of a block that layers share, and the recurrence that takes what it gives; see `shared_block`."""

    before: Norm  # [2E]
    attention: Attention
    between: Norm
    feed_forward: FeedForward
    output: Linear
    norm: Norm
    recurrence: Recurrence
    # All products but the recurrence's that no use before it has.
    own: Sequence[Linear]

    # Its input goes to a norm of its own.
    entry = None


StateMixer = ShortConvolution | Recurrence | RecurrentUnit | SelectiveUnit
Mixer = Attention | LatentAttention | StateMixer | JointMixer | SharedUse


@dataclass(kw_only=True)
class FeedForward:
    """act(gate) * up, then down; or act(up), then down, where it is `plain`."""

    gate_up: Linear
    down: Linear
    activation: str
    plain: bool = False
    coefficients: Values | None = None  # [4], of an activation that learns some
    # Gates are cut off so many standard deviations above their mean; None: they are not.
    cut: float | None = None

    @property
    def entry(self) -> Linear:
        """The only one that the layer's input goes to."""
        return self.gate_up


@dataclass(kw_only=True)
class SparseFeedForward:
    """Router, experts, and perhaps a shared feed-forward that every token passes."""

    spec: ExpertSpec
    router: Linear
    correction: Values | None = None
    # What the shares of the chosen experts are multiplied by [X].
    expert_scales: Values | None = None
    # Empty where they are multiplied `together` (a back end of torch groups them).
    experts: Sequence[FeedForward]
    activation: str
    shared: FeedForward | None = None
    # Its one output's sigmoid multiplies the shared feed-forward.
    shared_gate: Linear | None = None
    together: Any = None
    # To what experts take, and from what they give, where that is not the stream.
    latent_in: Linear | None = None
    latent_out: Linear | None = None
    # Who stands where, among ranks that exchange experts (ExpertPlaces).
    places: Any = None

    # Its input goes to the router, too.
    entry = None


@dataclass(kw_only=True)
class JoinedFeedForward:
    """A dense feed-forward and experts side by side, of which each has a norm after it; see
    `joined_experts`.
    """

    dense: FeedForward
    sparse: SparseFeedForward
    # What the router and the experts take is the stream, by norms of their own.
    router_norm: Norm
    sparse_norm: Norm
    dense_after: Norm
    sparse_after: Norm

    @property
    def entry(self) -> Linear:
        """The only one that the layer's normed input goes to."""
        return self.dense.gate_up


@dataclass(kw_only=True)
class PerLayerInput:
    """What a layer does with its part of the second embedding; see `per_layer`."""

    index: int
    gate: Linear
    projection: Linear
    activation: str


@dataclass(kw_only=True)
class PerLayerTable:
    """The second embedding, and the product that adds what the first one says."""

    table: Values  # [rows, layers * width], an array holds the bits of `table_type`
    table_type: str
    # The factor of its rows, perhaps as `table_type` rounds it.
    scale: float
    projection: Linear  # [layers * width, E]
    # Its outputs are multiplied by this before their norm, which is one layer's.
    projection_scale: float
    norm: Norm  # [width]
    width: int


@dataclass(kw_only=True)
class AltUp:
    """How a layer predicts and corrects the streams, and what lies beside its attention; see `altup`."""

    router_norm: Norm
    router: Linear  # [A, E]
    prediction: Values  # [A * A, A]
    correction: Values  # [A, A]
    scale: Values | None  # [E], of the active stream
    active: int
    left: Linear  # [rank, E]
    right: Linear  # [E, rank]
    laurel_norm: Norm


@dataclass(kw_only=True)
class StreamEnds:
    """Products that make the other streams of the first one, and that bring them back."""

    outward: Sequence[Linear]  # A - 1 of [E, E]
    inward: Sequence[Linear]


@dataclass(kw_only=True)
class Layer:
    """Attention or what is there in its place, feed-forward, and the norms before and after each of them;
    behind both perhaps a per-layer input, with a norm after it. Either half may be absent.
    """

    attention: Mixer | None
    feed_forward: FeedForward | SparseFeedForward | JoinedFeedForward | None
    before: Sequence[Norm | None]
    after: Sequence[Norm | None]
    # Whether both halves take what the layer was given; without a norm of its own the second takes the
    # first's.
    parallel: bool = False
    per_layer: PerLayerInput | None = None
    altup: AltUp | None = None
    # What the stream is multiplied by behind the layer.
    gain: float = 1.0
    # Whether the norms after them are of the stream with what they add, and take its place.
    of_sums: bool = False

    @property
    def sparse(self) -> SparseFeedForward | None:
        """Its experts, where it has some."""
        fed = self.feed_forward
        if isinstance(fed, JoinedFeedForward):
            return fed.sparse
        return fed if isinstance(fed, SparseFeedForward) else None

    def linears(self) -> Iterator[Linear]:
        """Every linear layer that all tokens pass: all but router and experts."""
        fed = self.feed_forward
        dense = (
            fed if isinstance(fed, FeedForward) else fed.dense if isinstance(fed, JoinedFeedForward) else None
        )
        shared = None if self.sparse is None else self.sparse.shared
        mixer = self.attention
        joint = (mixer.attention, mixer.recurrence) if isinstance(mixer, JointMixer) else (mixer,)
        if isinstance(mixer, SharedUse):
            yield from mixer.own
            joint = (mixer.recurrence,)
        indexer = mixer.indexer if isinstance(mixer, LatentAttention) else None
        for part in (*joint, indexer, dense, shared, self.per_layer):
            if part is not None:
                yield from (value for value in vars(part).values() if isinstance(value, Linear))
        if self.sparse is not None and self.sparse.latent_in and self.sparse.latent_out:
            yield from (self.sparse.latent_in, self.sparse.latent_out)
        if self.altup is not None:
            yield from (self.altup.left, self.altup.right)

    def routed_linears(self) -> Iterator[Linear]:
        """The routers' products, the experts' own and the shared gate's."""
        if self.altup is not None:
            yield self.altup.router
        if self.sparse is not None:
            yield self.sparse.router
            if self.sparse.shared_gate is not None:
                yield self.sparse.shared_gate
            for expert in self.sparse.experts:
                yield from (expert.gate_up, expert.down)


@dataclass(kw_only=True)
class PooledHead:
    """A layer behind the pooling: x W^T + b, its activation, and perhaps a norm."""

    weight: Values  # [O, I] float32
    bias: Values | None
    activation: str
    norm: Norm | None = None


@dataclass(kw_only=True)
class DraftHead:
    """What a head that drafts has in front of its layer, whose first norm is that of the token's embedding;
    see `eagle3`. The layer's own product takes the normed hidden state.
    """

    # Products of the hidden states that are read of the target, whose sum is one [E].
    fusion: Sequence[Linear]
    hidden_norm: Norm
    # Queries, keys and values of the embedding, to which those of the hidden state are added.
    token_qkv: Linear
    # The target's ids of those that are drawn [V]; None where both are the same.
    target_ids: NDArray[np.int64] | None

    def linears(self) -> Iterator[Linear]:
        """All products."""
        yield from self.fusion
        yield self.token_qkv


@dataclass(kw_only=True)
class Predictor:
    """What a layer that predicts further tokens has in front of it; see `mtp`."""

    token_norm: Norm
    hidden_norm: Norm
    # Products of both, whose sum the layer takes [E].
    token: Linear
    hidden: Linear
    # As in DraftHead: it draws what its target does.
    target_ids: None = None

    def linears(self) -> Iterator[Linear]:
        """All products."""
        yield from (self.token, self.hidden)


@dataclass(kw_only=True)
class MedusaHeads:
    """Heads that draft, and have no layers; see `medusa`."""

    # Products by head.
    blocks: Sequence[Sequence[Linear]]
    # What makes logits, by head; or one for all of them.
    projections: Sequence[Linear]
    # As in DraftHead.
    target_ids: NDArray[np.int64] | None

    def linears(self) -> Iterator[Linear]:
        """All products."""
        for blocks in self.blocks:
            yield from blocks
        yield from self.projections


@dataclass(kw_only=True)
class ModelRecord:
    """A loaded model."""

    spec: ModelSpec
    max_model_len: int
    embedding: Values  # [V, E], an array holds the bits of `embedding_type`
    embedding_type: str
    # The factor, perhaps as `embedding_type` rounds it.
    embedding_scale: float = 1.0
    layers: Sequence[Layer]
    # Behind the last layer; and what makes logits, unless the model pools.
    norm: Norm | None = None
    head: Linear | None = None
    ropes: Sequence[tuple[Values, Values]] = ()  # cos and sin [L, R/2]
    # What queries are multiplied by under each rotation, by their positions [L].
    query_scales: Sequence[Values | None] = ()
    # Added to the embedding: [L, E] float32, once for each text of a pair.
    positions: Values | None = None
    per_layer: PerLayerTable | None = None
    stream_ends: StreamEnds | None = None
    embedding_norm: Norm | None = None
    heads: Sequence[PooledHead] = ()
    # Where it is a head that drafts: its embedding is empty where it reads the target's, or none.
    draft_head: DraftHead | MedusaHeads | Predictor | None = None

    def linears(self) -> Iterator[Linear]:
        """Every linear layer that all tokens pass, the head of logits left out."""
        for layer in self.layers:
            yield from layer.linears()
        if self.draft_head is not None:
            yield from self.draft_head.linears()


_RECORDS = (
    *(Linear, Norm, Attention, LatentAttention, ShortConvolution, Recurrence, RecurrentUnit, SelectiveUnit),
    *(FeedForward, SparseFeedForward, JoinedFeedForward, Indexer, PerLayerInput, PerLayerTable),
    *(JointMixer, AltUp, StreamEnds, Layer, PooledHead, DraftHead, MedusaHeads, Predictor, ModelRecord),
)


def host_arrays(record: Any) -> Any:
    """A record, or what is in one, with arrays over the memory of its tensors: in float32, but for the bits
    of embeddings.
    """
    if isinstance(record, _RECORDS):
        fields: dict[str, Any] = {
            name: _bits(value) if name in ("embedding", "table") else host_arrays(value)
            for name, value in vars(record).items()
        }
        return type(record)(**fields)
    if isinstance(record, list | tuple):
        return type(record)(map(host_arrays, record))
    if hasattr(record, "data_ptr"):
        return record.float().contiguous().numpy()
    return record


def _bits(table: Any) -> NDArray[Any]:
    # numpy has no bfloat16.
    import torch

    bits = table.contiguous()
    found: NDArray[Any] = (bits.view(torch.uint16) if bits.dtype == torch.bfloat16 else bits).numpy()
    return found
