"""The decoder that all families share: embedding, layers with their norms, final norm, head.

Shape letters: T tokens, E hidden size, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.model.altup import advance_streams, gathered, read_altup, spread
from engine.model.expert_reading import read_sparse
from engine.model.experts import feed_sparse
from engine.model.forward_batch import ForwardBatch
from engine.model.joined_experts import feed_joined, read_joined
from engine.model.latent_attention import attend_latents, read_latents
from engine.model.layers import (
    StepContext,
    attend,
    entering,
    feed,
    multiply,
    normed,
    read_attention,
    read_feed_forward,
    read_norm,
)
from engine.model.per_layer import add_input, inputs_of, read_input
from engine.model.records import (
    Attention,
    FeedForward,
    JoinedFeedForward,
    JointMixer,
    LatentAttention,
    Layer,
    Linear,
    Mixer,
    ModelRecord,
    Norm,
    Recurrence,
    SharedUse,
    SparseFeedForward,
)
from engine.model.shared_block import read_shared_use, use_shared
from engine.model.spec import NEVER_DRAWN, ModelSpec
from engine.model.state_layers import STATE_MIXES, read_state, recur
from engine.model.weights import WeightReader
from kernels.adapters.backends import adapter_step
from kernels.attention.backends import AttentionBackend
from kernels.host import on_device
from kernels.paged_cache.channel_cache import begin_step, channel_caches
from kernels.paged_cache.store import LayerCache
from kernels.selection import Kernels

# Placement to the names of norms (before attention, before feed-forward), (after attention, after
# feed-forward).
NORM_NAMES: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "pre": (("input_layernorm", "post_attention_layernorm"), ("", "")),
    "post": (("", ""), ("post_attention_layernorm", "post_feedforward_layernorm")),
    "sandwich": (
        ("input_layernorm", "pre_feedforward_layernorm"),
        ("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    "sum": (("", ""), ("post_attention_layernorm", "post_feedforward_layernorm")),
    "parallel": (("input_layernorm", "post_attention_layernorm"), ("", "")),
    "parallel_shared": (("input_layernorm", ""), ("", "")),
}


def read_layer(weights: WeightReader, index: int, spec: ModelSpec) -> Layer:
    """The layer `index` of a checkpoint."""
    prefix = f"model.layers.{index}"
    placement: str = spec.norm_placement
    if spec.state is not None and index in spec.state.layers:
        placement = spec.state_norm_placement or placement
    before, after = NORM_NAMES[placement]
    if spec.experts is not None and spec.experts.output_norm and index in spec.experts.layers:
        after = (after[0], "post_feedforward_layernorm")
    uses_block = spec.shared_block is not None and index in spec.shared_block.layers
    if uses_block or not (index or spec.first_norm):
        before = ("", before[1])
    if placement == "sum" and spec.final_norm and index + 1 == spec.num_layers:
        # That takes the place of the layer's own.
        after = (after[0], "")

    def norm(name: str) -> Norm | None:
        return read_norm(weights, f"{prefix}.{name}", spec.hidden_size, spec) if name else None

    read_own = read_shared_use if uses_block else _read_mixer
    mixer = read_own(weights, prefix, spec, index)
    feed_forward = None
    if spec.feed_forward_layers is None or index in spec.feed_forward_layers:
        feed_forward = _read_half(weights, prefix, spec, index)
    has_half = (mixer is not None, feed_forward is not None)
    layer = Layer(
        attention=mixer,
        feed_forward=feed_forward,
        before=[norm(name) if has else None for name, has in zip(before, has_half, strict=True)],
        after=[norm(name) if has else None for name, has in zip(after, has_half, strict=True)],
        parallel=placement in ("parallel", "parallel_shared"),
        of_sums=placement == "sum",
    )
    if spec.per_layer is not None:
        layer.per_layer = read_input(weights, prefix, spec, index)
        layer.after = (*layer.after, norm("post_per_layer_input_norm"))
    if spec.altup is not None:
        layer.altup = read_altup(weights, prefix, spec)
    if spec.layer_scalars:
        name = f"{prefix}.layer_scalar"
        name = name if weights.has(name) else f"{name}.weight"
        layer.gain = float(weights.take(name, (1,), dtype=torch.float32))
    return layer


def _read_half(weights: WeightReader, prefix: str, spec: ModelSpec, index: int) -> Any:
    """The feed-forward of a layer."""
    if spec.experts is None or index not in spec.experts.layers:
        dense = read_feed_forward(weights, f"{prefix}.mlp", spec, spec.intermediate_size_of(index))
        dense.cut = spec.gate_cuts[index] if spec.gate_cuts else None
        return dense
    if spec.experts.joins_dense:
        return read_joined(weights, prefix, spec, index)
    return read_sparse(weights, prefix, spec)


def _read_mixer(weights: WeightReader, prefix: str, spec: ModelSpec, index: int) -> Mixer | None:
    """Attention, or what is there in its place or beside it."""
    attention: Attention | LatentAttention | None = None
    if index in spec.attending:
        read = read_latents if spec.latent else read_attention
        attention = read(weights, f"{prefix}.self_attn", spec, index)
    if spec.state is None or index not in spec.state.layers:
        return attention
    state = read_state(weights, f"{prefix}.state", spec, index)
    if isinstance(attention, Attention) and isinstance(state, Recurrence):
        return JointMixer(attention=attention, recurrence=state)
    return state


def mix(mixer: Mixer, x: Any, cache: Any, step: StepContext) -> Tensor:
    """x [T, E] -> [T, E] by attention, or what is there in its place; writes what later tokens need."""
    if isinstance(mixer, LatentAttention):
        return attend_latents(mixer, x, cache, step)
    if isinstance(mixer, JointMixer):
        return recur(mixer.recurrence, x, cache.state, step) + attend(mixer.attention, x, cache.keys, step)
    if isinstance(mixer, Attention):
        return attend(mixer, x, cache, step)
    if isinstance(mixer, SharedUse):
        return use_shared(mixer, x, cache, step)
    return STATE_MIXES[type(mixer)](mixer, x, cache, step)


def advance(
    layer: Layer, x: Tensor, change: Tensor | None, cache: Any, step: StepContext
) -> tuple[Tensor, Tensor | None]:
    """The stream x [T, E] (or several [A, T, E]) and what is to be added to it, before the layer -> the same
    after it. Adding is left to the norm that follows, which has the numbers at hand.
    """
    if layer.altup is not None:
        assert change is None, "it is added there"
        return advance_streams(layer, x, cache, step), None
    mixer, feed_forward = layer.attention, layer.feed_forward
    if layer.of_sums:
        return _advance_sums(layer, x, cache, step), None
    is_shared = layer.parallel and layer.before[1] is None
    if mixer is not None:
        x, inner = _enter(layer, 0, x, change, None if is_shared else mixer.entry, step)
        change = _leave(layer, 0, mix(mixer, inner, cache, step), step)
    if feed_forward is None:
        return x, change
    if layer.parallel:
        attended = change
        if not is_shared:
            _, inner = _enter(layer, 1, x, None, feed_forward.entry, step)
    else:
        x, inner = _enter(layer, 1, x, change, feed_forward.entry, step)
    fed = _leave(layer, 1, _feed(feed_forward, inner, x, step), step)
    if layer.per_layer is not None:
        x = x + fed
        fed = _leave(layer, 2, add_input(layer.per_layer, x, step), step)
    if layer.gain != 1.0:
        return (x + fed) * layer.gain, None
    if not layer.parallel:
        return x, fed
    assert attended is not None, "both halves are there"
    return x, attended + fed


def _feed(
    feed_forward: FeedForward | SparseFeedForward | JoinedFeedForward,
    inner: Any,
    stream: Tensor,
    step: StepContext,
) -> Tensor:
    if isinstance(feed_forward, JoinedFeedForward):
        return feed_joined(feed_forward, inner, stream, step)
    if isinstance(feed_forward, SparseFeedForward):
        return feed_sparse(feed_forward, inner, step.kernels, step.adapters)
    return feed(feed_forward, inner, step.kernels, step.adapters)


def _advance_sums(layer: Layer, x: Tensor, cache: LayerCache, step: StepContext) -> Tensor:
    """A layer whose norms take the place of the stream."""
    attention, feed_forward = layer.attention, layer.feed_forward
    (first, second), kernels = layer.after, step.kernels
    assert attention is not None, "both halves are there"
    assert feed_forward is not None, "as above"
    assert first is not None, "the second alone may be the model's last"
    x = normed(first, x + mix(attention, x, cache, step), kernels)
    x = x + _feed(feed_forward, x, x, step)
    return x if second is None else normed(second, x, kernels)


def _enter(
    layer: Layer, half: int, x: Tensor, change: Tensor | None, entry: Linear | None, step: StepContext
) -> tuple[Tensor, Any]:
    before = layer.before[half]
    if before is None:
        x = x if change is None else x + change
        return x, x
    # What is rounded on the way is not what adapters take, nor readers.
    entry = None if step.adapters or step.read else entry
    return entering(before, x, change, entry, step.kernels)


def _leave(layer: Layer, half: int, change: Tensor, step: StepContext) -> Tensor:
    after = layer.after[half]
    return change if after is None else normed(after, change, step.kernels)


class Decoder:
    """A loaded model as torch computes it. Not thread-safe; nothing in it changes."""

    def __init__(self, record: ModelRecord, kernels: Kernels) -> None:
        self.record = record
        self.kernels = kernels
        # Rows of a step are padded to a multiple of this.
        self.row_multiple = kernels.linear.row_multiple
        self.spec = record.spec
        self.max_model_len = record.max_model_len
        self.embedding = cast("Tensor", record.embedding)  # [V, E]
        self.layers = record.layers
        self.head = record.head  # [V, E]
        self.ropes = cast("list[tuple[Tensor, Tensor]]", record.ropes)
        # Set by who makes them (engine/adapters).
        self.num_adapter_slots = 0

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.embedding.device

    def wake(self) -> None:
        """A step follows shortly."""

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, caches: list[LayerCache], attention: AttentionBackend) -> Tensor:
        """Hidden states [T, E] of the step's tokens, before the final norm; fills `caches`."""
        plan, ragged = attention.plan(batch.ragged, batch.slots.device), batch.ragged
        cut_plans: list[Any] = [None, None]
        adapters = None if batch.adapters is None else on_device(batch.adapters, self.device)
        states = windows = None
        kept = ragged
        if batch.states is not None:
            states = self.kernels.recurrent.place(
                batch.states,
                ragged.query_starts,
                ragged.context_lens,
                batch.token_ids.shape[0],
                self.device,
            )
        if batch.windows is not None:
            kept = replace(ragged, block_tables=batch.windows.block_tables)
            windows = batch.windows.slots, attention.plan(kept, batch.slots.device)
        for in_windows in (False, True):
            if by_channel := [each for each in channel_caches(caches) if each.in_windows == in_windows]:
                cut = begin_step(by_channel, kept if in_windows else ragged, batch.recent_rows, batch.slots)
                cut_plans[in_windows] = attention.plan(cut, batch.slots.device)
        return self.run(
            batch.token_ids,
            batch.positions,
            batch.slots,
            caches,
            attention,
            plan,
            adapters,
            states,
            windows,
            (cut_plans[0], cut_plans[1]),
        )

    @torch.inference_mode()
    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        caches: list[LayerCache],
        attention: AttentionBackend,
        attention_plan: Any,
        adapters: Tensor | None = None,
        states: Any = None,
        windows: tuple[Tensor, Any] | None = None,
        cut_plans: tuple[Any, Any] = (None, None),
    ) -> Tensor:
        """`forward` of tokens [T] whose attention is planned already; on a GPU without a word from the host,
        so that it can be captured (see `captures`). `adapters` [T] are the slots of the rows' adapters;
        `windows` and `cut_plans` as in StepContext: caches whose keys are by channel know the step.
        """
        changes = None if adapters is None else adapter_step(self.kernels, adapters, self.num_adapter_slots)
        step = StepContext(
            kernels=self.kernels,
            slots=slots,
            rotations=[
                (cos.index_select(0, positions), sin.index_select(0, positions)) for cos, sin in self.ropes
            ],
            query_scales=[
                None if scales is None else cast("Tensor", scales).index_select(0, positions)
                for scales in self.record.query_scales
            ],
            attention=attention,
            attention_plan=attention_plan,
            windows=windows,
            cut_plans=cut_plans,
            adapters=changes,
            states=states,
            dtype=self.embedding.dtype,
        )
        change: Tensor | None = None
        x = self._embedded(token_ids, positions, step)
        for layer, cache in zip(self.layers, caches, strict=True):
            x, change = advance(layer, x, change, cache, step)
        return self._left(x if change is None else x + change)

    def _left(self, x: Tensor) -> Tensor:
        """What the last layer leaves, as one stream [T, E]; as it is pooled, where it is."""
        if self.record.stream_ends is not None:
            x = gathered(self.record.stream_ends, x)
        if self.spec.pooling is None or self.record.norm is None:
            return x
        return normed(self.record.norm, x, self.kernels)

    def _embedded(self, token_ids: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """The stream [T, E] before the first layer, or several [A, T, E]."""
        record, x = self.record, self.embedding.index_select(0, token_ids)
        if self.spec.embedding_scale != 1.0:
            x = x * record.embedding_scale
        if record.positions is not None:
            x = x + cast("Tensor", record.positions).index_select(0, positions).to(x.dtype)
        if record.per_layer is not None:
            step.per_layer = inputs_of(record.per_layer, token_ids, x, self.kernels)
        if record.embedding_norm is not None:
            x = normed(record.embedding_norm, x, self.kernels)
        step.embedded = None if self.spec.shared_block is None else x
        return x if record.stream_ends is None else spread(record.stream_ends, x)

    @property
    def captures(self) -> bool:
        """Whether `run` and `logits` of the same number of rows can be captured in a graph: no layer asks the
        device for anything, or the host for where states lie.
        """
        return self.spec.state is None and all(
            layer.sparse is None or layer.sparse.together is not None for layer in self.layers
        )

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, E], R a multiple of row_multiple -> [R, V] in float32."""
        assert self.head is not None, "it generates"
        assert self.record.norm is not None, "as above"
        logits = multiply(self.head, normed(self.record.norm, hidden, self.kernels)).float()
        cap = self.spec.logit_soft_cap
        if cap is None:
            return logits
        # What is never drawn stays beyond any cap.
        capped = cap * torch.tanh(logits / cap)
        return torch.where(logits < NEVER_DRAWN / 10, logits, capped) if self.spec.holes else capped

    @torch.inference_mode()
    def logits_of(self, hidden: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """Logits [R, V] of the given rows of hidden [T, E]; any number of them."""
        padded = np.pad(rows, (0, -rows.size % self.row_multiple))
        chosen = hidden.index_select(0, on_device(padded, hidden.device))
        return self.logits(chosen)[: rows.size]
