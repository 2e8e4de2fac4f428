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

import numpy as np
from numpy.typing import NDArray

from engine.model.spec import ExpertSpec, LatentSpec, ModelSpec, StateSpec
from kernels.attention.ragged import AttentionOptions
from kernels.host import Values
from kernels.linear.packed import PackedWeight

Floats = NDArray[np.float32]


@dataclass(kw_only=True)
class Linear:
    """x W^T + b [outputs, inputs]; several tensors of the checkpoint may be stacked into one."""

    # A WeightFormat; or a PackedWeight, which holds the bias.
    weight: Any
    bias: Any = None
    # The weight as torch multiplies with it, made when it is packed for torch.
    product: Any = None
    # Adapters find the layer by its number of inputs and by (name, outputs) of each tensor that was stacked
    # in it; empty where the layer takes no adapters.
    inputs: int = 0
    parts: Sequence[tuple[str, int]] = ()
    # Changes that loaded adapters make to the product: NativeChanges or TorchChanges (kernels/adapters).
    changes: Any = None

    @property
    def packed(self) -> PackedWeight:
        """The weight as the native kernels take it."""
        assert isinstance(self.weight, PackedWeight), "packed while it was loaded"
        return self.weight


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
    # Outputs of q, k and v.
    sizes: Sequence[int]
    num_heads: int
    num_kv_heads: int
    options: AttentionOptions
    # Index of its table of angles.
    rope: int
    interleaved: bool
    # Norm of queries and keys: "none", per "head", or over all heads together ("full").
    qk_norm: str
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    # Whether these come after the rotation.
    norm_last: bool = False
    sinks: Values | None = None  # [H]
    # Whether `qkv` gives gates, too, behind the values: as many as queries.
    gated: bool = False

    @property
    def entry(self) -> Linear:
        """The only one that the layer's input goes to."""
        return self.qkv


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
    and gains; the channels are queries, keys and values.
    """

    spec: StateSpec
    inner: Linear
    places: StatePlaces
    weight: Values  # [W, C]
    bias: Values | None
    rate: Values  # [H], negative
    step_bias: Values  # [H]
    skip: Values | None  # [H]
    norm: Values | None
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


Mixer = Attention | LatentAttention | ShortConvolution | Recurrence | JointMixer


@dataclass(kw_only=True)
class FeedForward:
    """act(gate) * up, then down; or act(up), then down, where it is `plain`."""

    gate_up: Linear
    down: Linear
    activation: str
    plain: bool = False
    coefficients: Values | None = None  # [4], of an activation that learns some

    @property
    def entry(self) -> Linear:
        """The only one that the layer's input goes to."""
        return self.gate_up


@dataclass(kw_only=True)
class SparseFeedForward:
    """Router, experts, and perhaps a shared feed-forward that every token passes."""

    spec: ExpertSpec
    router: Linear
    correction: Values | None
    # Empty where they are multiplied `together` (a back end of torch groups them).
    experts: Sequence[FeedForward]
    activation: str
    shared: FeedForward | None
    # Its one output's sigmoid multiplies the shared feed-forward.
    shared_gate: Linear | None = None
    together: Any = None

    # Its input goes to the router, too.
    entry = None


@dataclass(kw_only=True)
class Layer:
    """Attention or what is there in its place, feed-forward, and the norms before and after each of them.
    Either half may be absent.
    """

    attention: Mixer | None
    feed_forward: FeedForward | SparseFeedForward | None
    before: Sequence[Norm | None]
    after: Sequence[Norm | None]
    # Whether both halves take what the layer was given; without a norm of its own the second takes the
    # first's.
    parallel: bool = False

    def linears(self) -> Iterator[Linear]:
        """Every linear layer that all tokens pass: all but router and experts."""
        fed = self.feed_forward
        dense = fed.shared if isinstance(fed, SparseFeedForward) else fed
        mixer = self.attention
        joint = (mixer.attention, mixer.recurrence) if isinstance(mixer, JointMixer) else (mixer,)
        for part in (*joint, dense):
            if part is not None:
                yield from (value for value in vars(part).values() if isinstance(value, Linear))

    def routed_linears(self) -> Iterator[Linear]:
        """The router's product, the experts' own and the shared gate's."""
        if isinstance(self.feed_forward, SparseFeedForward):
            yield self.feed_forward.router
            if self.feed_forward.shared_gate is not None:
                yield self.feed_forward.shared_gate
            for expert in self.feed_forward.experts:
                yield from (expert.gate_up, expert.down)


@dataclass(kw_only=True)
class ModelRecord:
    """A loaded model."""

    spec: ModelSpec
    max_model_len: int
    embedding: Values  # [V, E], an array holds the bits of `embedding_type`
    embedding_type: str
    # The factor, perhaps as `embedding_type` rounds it.
    embedding_scale: float
    layers: Sequence[Layer]
    norm: Norm
    head: Linear
    ropes: Sequence[tuple[Values, Values]]  # cos and sin [L, R/2]
    # What queries are multiplied by under each rotation, by their positions [L].
    query_scales: Sequence[Values | None]
    positions: Values | None = None  # [L, E] float32, added to the embedding


_RECORDS = (
    *(Linear, Norm, Attention, LatentAttention, ShortConvolution, Recurrence, JointMixer),
    *(FeedForward, SparseFeedForward, Layer, ModelRecord),
)


def host_arrays(record: Any) -> Any:
    """A record, or what is in one, with arrays over the memory of its tensors: in float32, but for the bits
    of the embedding.
    """
    if isinstance(record, _RECORDS):
        fields: dict[str, Any] = {
            name: _bits(value) if name == "embedding" else host_arrays(value)
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
