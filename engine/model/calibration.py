"""Ranges of the inputs of linear layers, measured while a model is loaded, for products of int8 by int8.

Each layer is run once, dense, over a short text as soon as it is built; then its weights are smoothed by the
ranges that its inputs had, and quantized. So at most one layer is dense at a time. The text is the constant
below, encoded by the checkpoint's tokenizer; where there is none, evenly drawn token ids stand in, as
most of the channels that carry outliers do so for any token.

Experts see too few tokens here to be judged, and are not smoothed.

Shape letters: T tokens, E hidden size, K inputs.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tokenizers
import torch
from torch import Tensor

from checkpoint.vocabulary import whole_tokenizer_json
from engine.model.altup import spread
from engine.model.decoder import advance
from engine.model.indexer import torch_attention
from engine.model.layer_spec import CacheShape
from engine.model.layers import StepContext, embedding_scale
from engine.model.per_layer import inputs_of
from engine.model.records import Attention, JointMixer, LatentAttention, Layer, PerLayerTable, StreamEnds
from engine.model.rope import query_scales, rope_table
from engine.model.spec import ModelSpec
from engine.model.weights import WeightReader
from engine.quantization.at_load import quantize
from kernels.attention.ragged import RaggedBatch
from kernels.linear.formats import DenseWeight
from kernels.linear.reference import Product
from kernels.linear.rows import ROW_MULTIPLE
from kernels.paged_cache.store import allocate_layer
from kernels.recurrent.rows import StateRows
from kernels.recurrent.store import JointCache, NoCache, allocate_states
from runtime.errors import ConfigError

_log = logging.getLogger(__name__)

NUM_TOKENS = 256
BLOCK_SIZE = 64

TEXT = """\
The lighthouse keeper wrote down the weather every morning. On the third of March, 1911, the wind came from \
the north-west and the sea was rough; two ships passed before noon. "Will it clear up?" asked the boy. "By \
evening," she said, "or not at all."

Question: A train leaves at 9:40 and arrives at 11:25. How long does it take?
Answer: From 9:40 to 11:40 is two hours, 15 minutes less is 1 hour and 45 minutes.

{"name": "Anna Berg", "age": 34, "city": "Oslo", "languages": ["Norwegian", "English"], "member": true}

def mean(values: list[float]) -> float:
    # An empty list has no mean.
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)

Water boils at 100 degrees Celsius at sea level, and at about 90 degrees on a mountain of 3,000 metres, \
because the air presses less. La mer était calme. Der Hund schläft unter dem Tisch. Thank you very much!
"""


class Calibration:
    """Quantizes layers one after another, each with the ranges that its inputs have."""

    def __init__(
        self,
        weights: WeightReader,
        spec: ModelSpec,
        embedding: Tensor,
        table: Tensor | None,
        max_model_len: int,
        per_layer: PerLayerTable | None = None,
        ends: StreamEnds | None = None,
    ) -> None:
        """`table` [L, E] holds what is added to embeddings by position, `per_layer` what layers read beside
        them, `ends` what makes several streams of one.
        """
        self.spec, self.config, self.kernels = spec, weights.config, weights.kernels
        token_ids = _token_ids(
            weights.folder, spec, min(NUM_TOKENS, max_model_len // ROW_MULTIPLE * ROW_MULTIPLE)
        )
        count = token_ids.shape[0]
        device = embedding.device
        self.x = embedding.index_select(0, token_ids.to(device))  # [T, E]
        if spec.embedding_scale != 1.0:
            self.x = self.x * embedding_scale(spec, self.x.dtype)
        if table is not None:
            self.x = self.x + table[:count].to(self.x.dtype)
        self.num_blocks = -(-count // BLOCK_SIZE)
        attention = torch_attention(spec)
        ragged = RaggedBatch(
            query_starts=np.array([0, count]),
            context_lens=np.array([count]),
            block_tables=np.arange(self.num_blocks)[None],
            block_size=BLOCK_SIZE,
        )
        positions = torch.arange(count)
        tables = [rope_table(rope, max_model_len) for rope in spec.ropes]
        self.step = StepContext(
            kernels=weights.kernels,
            slots=positions.to(device),
            rotations=[(cos[positions].to(device), sin[positions].to(device)) for cos, sin in tables],
            query_scales=[
                None if scales is None else scales[positions].to(device)
                for scales in (query_scales(rope, max_model_len) for rope in spec.ropes)
            ],
            attention=attention,
            attention_plan=attention.plan(ragged, device),
            states=None
            if spec.state is None
            else weights.kernels.recurrent.place(
                _one_state(), ragged.query_starts, ragged.context_lens, count, device
            ),
            dtype=self.x.dtype,
        )
        if per_layer is not None:
            projection = per_layer.projection
            projection.product = self.kernels.linear.pack(projection.weight)
            self.step.per_layer = inputs_of(per_layer, token_ids.to(device), self.x, self.kernels)
        if ends is not None:
            for linear in ends.outward:
                linear.product = self.kernels.linear.pack(linear.weight)
            self.x = spread(ends, self.x)
        # Of each layer that was run; None where no later one reads it.
        self.caches: list[Any] = []

    @torch.inference_mode()
    def finish(self, layer: Layer) -> None:
        """Runs a dense layer, the one after those that were, and quantizes its linear layers."""
        index = len(self.caches)
        stored = self.spec.cache_shape(index)
        source = self.spec.cache_source(index)
        cache = self.caches[source] if source != index else self._cache(layer, stored)
        self.caches.append(cache)
        watched = []
        for linear in (*layer.linears(), *layer.routed_linears()):
            linear.product = self.kernels.linear.pack(linear.weight)
        for linear in layer.linears():
            linear.product = _Watch(linear.product)
            watched.append((linear, linear.product))
        x, change = advance(layer, self.x, None, cache, self.step)
        self.x = x if change is None else x + change
        if not (self.spec.layer_heads or self.spec.bidirectional):
            # No later layer has its place there.
            self.caches[-1] = None
        for linear, watch in watched:
            assert isinstance(linear.weight, DenseWeight), "dense until it is calibrated"
            linear.weight = quantize(linear.weight.values, self.config, watch.range)

    def _cache(self, layer: Layer, stored: CacheShape | None) -> Any:
        """Room for the layer's keys and values, or for its state."""
        spec, device = self.spec, self.x.device
        keys: Any = NoCache()
        if stored is not None:
            keys = allocate_layer(
                num_blocks=self.num_blocks,
                block_size=BLOCK_SIZE,
                **msgspec.structs.asdict(stored),
                dtype=torch.float32,
                device=device,
            )
        if spec.state is None or isinstance(layer.attention, Attention | LatentAttention):
            return keys
        state = allocate_states(spec.state.shape, 1, device)
        return JointCache(keys=keys, state=state) if isinstance(layer.attention, JointMixer) else state


def _one_state() -> StateRows:
    """Of one sequence in slot 0."""
    zero = np.zeros(1, np.int64)
    return StateRows.of(zero, zero, zero, [()])


class _Watch:
    """A product that remembers the largest magnitude of each input."""

    def __init__(self, product: Product) -> None:
        self.product = product
        self.range: Tensor | None = None  # [K]

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        seen = x.float().abs().amax(0)
        self.range = seen if self.range is None else torch.maximum(self.range, seen)
        return self.product(x, bias)


def _token_ids(folder: Path, spec: ModelSpec, count: int) -> Tensor:
    """Token ids [count] of TEXT, repeated where it is too short."""
    found: list[int] = []
    try:
        tokenizer = tokenizers.Tokenizer.from_str(whole_tokenizer_json(folder))
        ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
        found = [token for token in ids if token < spec.vocab_size]
    except ConfigError as error:
        _log.warning("ranges of activations are calibrated on evenly drawn token ids: %s", error)
    if not found:
        return torch.randint(spec.vocab_size, (count,), generator=torch.Generator().manual_seed(0))
    return torch.tensor((found * (count // len(found) + 1))[:count])
