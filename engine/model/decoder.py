"""The decoder that all families share: embedding, layers, final norm, head.

Shape letters: T tokens, E hidden size, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.config import EngineConfig
from engine.kernels.attention import AttentionBackend
from engine.kernels.linear import DenseWeight
from engine.kernels.paged_cache import LayerCache
from engine.kernels.selection import Kernels
from engine.kernels.transfer import on_device
from engine.model.calibration import Calibration, linears
from engine.model.experts import SparseFeedForward
from engine.model.forward_batch import ForwardBatch
from engine.model.latent_attention import LatentAttention
from engine.model.layers import Attention, FeedForward, Linear, Norm, StepContext
from engine.model.rope import rope_table
from engine.model.spec import ModelSpec
from engine.model.weights import WeightReader


class DecoderLayer:
    """Attention and feed-forward, each added to the residual stream, with norms where the family has them."""

    def __init__(self, weights: WeightReader, layer: int, spec: ModelSpec) -> None:
        prefix = f"model.layers.{layer}"
        attention = LatentAttention if spec.latent else Attention
        self.attention = attention(weights, f"{prefix}.self_attn", spec, layer)
        self.feed_forward: FeedForward | SparseFeedForward
        if spec.experts and layer in spec.experts.layers:
            self.feed_forward = SparseFeedForward(weights, prefix, spec)
        else:
            self.feed_forward = FeedForward(weights, f"{prefix}.mlp", spec)
        before, after = NORM_NAMES[spec.norm_placement]
        norms = [
            Norm(weights, f"{prefix}.{name}", spec.hidden_size, spec) if name else None
            for name in before + after
        ]
        self.before, self.after = norms[:2], norms[2:]

    def linears(self) -> Iterator[Linear]:
        """Every linear layer, those of experts included."""
        yield from linears(self)
        if isinstance(self.feed_forward, SparseFeedForward):
            yield from self.feed_forward.routed_linears()

    def __call__(self, x: Tensor, cache: LayerCache, step: StepContext) -> Tensor:
        """x [T, E] -> [T, E]."""
        x, change = self.advance(x, None, cache, step)
        return x + change

    def advance(
        self, x: Tensor, change: Tensor | None, cache: LayerCache, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        """The stream x [T, E] and what is to be added to it, before the layer -> the same after it. Adding is
        left to the norm that follows, which has the numbers at hand.
        """
        x, inner = self._enter(0, x, change, self.attention.entry)
        change = self._leave(0, self.attention(inner, cache, step))
        x, inner = self._enter(1, x, change, self.feed_forward.entry)
        return x, self._leave(1, self.feed_forward(inner))

    def _enter(self, half: int, x: Tensor, change: Tensor | None, entry: Linear | None) -> tuple[Tensor, Any]:
        before = self.before[half]
        if before is None:
            x = x if change is None else x + change
            return x, x
        return before.entering(x, change, entry)

    def _leave(self, half: int, change: Tensor) -> Tensor:
        after = self.after[half]
        return change if after is None else after(change)


# Placement to the names of norms (before attention, before feed-forward), (after attention, after
# feed-forward).
NORM_NAMES: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "pre": (("input_layernorm", "post_attention_layernorm"), ("", "")),
    "post": (("", ""), ("post_attention_layernorm", "post_feedforward_layernorm")),
    "sandwich": (
        ("input_layernorm", "pre_feedforward_layernorm"),
        ("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
}


class Packing(Protocol):
    """Turns weights into products while a model is loaded, so that no more than a layer is held twice."""

    # Whether float16 weights lose nothing by it; else they are rounded to the serving type.
    keeps_float16: bool

    def pack(self, linear: Linear) -> None:
        """Makes the product of one linear layer."""


class TorchPacking:
    """Products of torch. Which one serves a shape is found out while loading, not in the first step."""

    keeps_float16 = False

    def pack(self, linear: Linear) -> None:
        _ = linear.product


class Decoder:
    """A loaded model. Not thread-safe; nothing in it changes after loading."""

    def __init__(
        self, weights: WeightReader, spec: ModelSpec, *, max_model_len: int, packing: Packing | None = None
    ) -> None:
        packing = packing or TorchPacking()
        self.kernels = weights.kernels
        # Rows of a step are padded to a multiple of this.
        self.row_multiple = self.kernels.linear.row_multiple
        self.spec = spec
        self.max_model_len = max_model_len
        self.embedding = weights.keep(
            "model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size)
        )  # [V, E]
        calibration = None
        if weights.calibrates:
            calibration = Calibration(weights.folder, spec, self.embedding, weights.config, max_model_len)
        self.layers = []
        for layer in range(spec.num_layers):
            self.layers.append(DecoderLayer(weights, layer, spec))
            if calibration is not None:
                calibration.finish(self.layers[-1])
            for linear in self.layers[-1].linears():
                packing.pack(linear)
        self.norm = Norm(weights, "model.norm", spec.hidden_size, spec)
        if spec.tied_embeddings:
            weights.discard("lm_head.weight")
            head = weights.quantized_head(DenseWeight(values=self.embedding))
        else:
            head = weights.head("lm_head", (spec.vocab_size, spec.hidden_size))
        self.head = Linear.of(head, self.kernels.linear)  # [V, E]
        packing.pack(self.head)
        device = weights.device
        self.ropes = [
            tuple(part.to(device) for part in rope_table(rope, max_model_len)) for rope in spec.ropes
        ]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.embedding.device

    def wake(self) -> None:
        """A step follows shortly."""

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, caches: list[LayerCache], attention: AttentionBackend) -> Tensor:
        """Hidden states [T, E] of the step's tokens, before the final norm; fills `caches`."""
        plan = attention.plan(batch.ragged, batch.slots.device)
        return self.run(batch.token_ids, batch.positions, batch.slots, caches, attention, plan)

    @torch.inference_mode()
    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        caches: list[LayerCache],
        attention: AttentionBackend,
        attention_plan: Any,
    ) -> Tensor:
        """`forward` of tokens [T] whose attention is planned already; on a GPU without a word from the host,
        so that it can be captured (see `captures`).
        """
        step = StepContext(
            slots=slots,
            rotations=[
                (cos.index_select(0, positions), sin.index_select(0, positions)) for cos, sin in self.ropes
            ],
            attention=attention,
            attention_plan=attention_plan,
        )
        x, change = self.embedding.index_select(0, token_ids), None
        if self.spec.embedding_scale != 1.0:
            # As a number that is rounded to x's type first.
            x = x * float(torch.tensor(self.spec.embedding_scale, dtype=x.dtype))
        for layer, cache in zip(self.layers, caches, strict=True):
            x, change = layer.advance(x, change, cache, step)
        return x if change is None else x + change

    @property
    def captures(self) -> bool:
        """Whether `run` and `logits` of the same number of rows can be captured in a graph: no layer asks the
        device for anything.
        """
        return all(
            not isinstance(layer.feed_forward, SparseFeedForward) or layer.feed_forward.together is not None
            for layer in self.layers
        )

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, E], R a multiple of row_multiple -> [R, V] in float32."""
        logits = self.head(self.norm(hidden)).float()
        cap = self.spec.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @torch.inference_mode()
    def logits_of(self, hidden: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """Logits [R, V] of the given rows of hidden [T, E]; any number of them."""
        padded = np.pad(rows, (0, -rows.size % self.row_multiple))
        chosen = hidden.index_select(0, on_device(padded, hidden.device))
        return self.logits(chosen)[: rows.size]


def load_decoder(
    folder: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    progress: Callable[[str, float], None],
    config: EngineConfig | None = None,
    packing: Packing | None = None,
    kernels: Kernels | None = None,
) -> Decoder:
    """Reads a checkpoint; `config` says whether its weights are quantized, `kernels` what it computes with
    (torch unless given).

    Raises CheckpointError naming a tensor that is missing, misshapen or unexpected.
    """
    with WeightReader(
        folder,
        dtype=dtype,
        device=device,
        progress=progress,
        scheme=spec.quantization,
        config=config,
        kernels=kernels,
        is_packed=packing is not None,
        keeps_float16=packing is not None and packing.keeps_float16,
    ) as weights:
        model = Decoder(weights, spec, max_model_len=max_model_len, packing=packing)
        weights.finish()
    return model
