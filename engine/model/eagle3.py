"""Heads that draft: one decoder layer over three hidden states of the model it was trained with (EAGLE-3,
arXiv 2503.01840), in the forms that people bring: the `speculators` format, and what SpecForge and EAGLE
themselves write. No torch here.

    g(p) = fc [h_low(p), h_mid(p), h_high(p)]                        the target's hidden states of position p
    y(p) = layer([norm(embedding of token p + 1), norm(g(p))])       its stream begins with g(p)
    token p + 2 ~ head(norm(y(p)));  and y(p) is g(p + 1) of the next draft

The engine's plan and loader read this; `eagle3_reading` reads the tensors, `eagle3_native` computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.model.config_reader import ConfigReader
from engine.model.draft_heads import FLOAT_BYTES, KEY, REMEDY, check_target
from engine.model.draft_tree import DraftTree
from engine.model.families.base import attention_biases, decoder_spec
from engine.model.kv_memory import kv_bytes_per_token, recent_bytes
from engine.model.layer_spec import DraftHeadSpec, MedusaSpec, PredictionSpec
from engine.model.spec import CheckpointError, ModelSpec, TensorHeader, TensorNames
from runtime.errors import ConfigError

EMBEDDING = "model.embed_tokens.weight"
NUM_STATES = 3
# Features that all sequences together may keep before they are read, and tokens of each at least.
_FEATURE_BYTES, _FEWEST_FEATURES = 64 << 20, 16
# Features that are read in one forward, so that a long prompt does not hold up everybody's next step.
MAX_READ_TOKENS = 512
# What is in front of names varies.
_NAMES = TensorNames(
    renamed=(
        (r"^(?:model\.)?(?:midlayer|layers\.0)\.", "model.layers.0."),
        (r"^(?:model\.)?(fc|norm|embed_tokens|d2t|t2d)\b", r"model.\1"),
    ),
)
# Variants whose tensors and sums are others.
_VARIANTS = ("fc_norm", "norm_before_fc", "norm_output")


def read_head_spec(folder: Path) -> ModelSpec:
    """The head in a checkpoint's folder: `vocab_size` are the ids that it draws, `num_embeddings` those of
    its target. Raises CheckpointError naming what is not a head of this kind.
    """
    reader = ConfigReader.of(folder)
    kind = reader.values.get("speculators_model_type")
    layer, norm_first = reader, False
    if kind is not None:
        reader.require("speculators_model_type", "eagle3", "eagle3")
        values = reader.values.get("transformer_layer_config")
        if not isinstance(values, dict):
            raise CheckpointError(f"{reader.source}: transformer_layer_config is missing")
        layer, norm_first = ConfigReader(values, f"{reader.source}: transformer_layer_config"), True
    elif "draft_vocab_size" not in reader.values:
        raise CheckpointError(
            f"{reader.source} describes no head of EAGLE-3: it has neither speculators_model_type nor "
            'draft_vocab_size; for a model of its own set engine.speculation.method to "draft_model"'
        )
    for variant in _VARIANTS:
        reader.require(variant, False, False)
    layer.require("num_hidden_layers", 1, 1)
    spec = decoder_spec(
        layer,
        **attention_biases(layer),
        mlp_bias=layer.flag("mlp_bias", False),
        tied_embeddings=False,
        names=_NAMES,
    )
    drawn = reader.count("draft_vocab_size", spec.num_embeddings)
    if drawn > spec.num_embeddings:
        raise CheckpointError(
            f"{reader.source}: draft_vocab_size = {drawn} exceeds vocab_size = {spec.num_embeddings}"
        )
    return msgspec.structs.replace(
        spec,
        architecture="EAGLE-3",
        vocab_size=drawn,
        draft_head=DraftHeadSpec(
            target_size=reader.count("target_hidden_size", spec.hidden_size),
            layers=_layers(reader),
            norm_before_residual=reader.flag("norm_before_residual", norm_first),
        ),
    )


def _layers(reader: ConfigReader) -> tuple[int, ...]:
    """The layers whose inputs are read. SpecForge's own key, which SGLang reads, counts outputs."""
    key = "eagle_aux_hidden_state_layer_ids"
    found = reader.numbers_of(key)
    nested: Any = reader.values.get("eagle_config")
    if not found and isinstance(nested, dict):
        inner = ConfigReader(nested, f"{reader.source}: eagle_config")
        found = tuple(layer + 1 for layer in inner.numbers_of(key) or ())
    if found and len(found) != NUM_STATES:
        raise CheckpointError(f"{reader.source}: {key} = {list(found)} must name {NUM_STATES} layers")
    return found or ()


def check_head(
    head: ModelSpec, headers: dict[str, TensorHeader], target: ModelSpec, config: EngineConfig, device: str
) -> None:
    """Raises ConfigError for a head that does not go with a model, or where there is none of its kind."""
    check_target(head, target, config, device)
    spec, given = head.draft_head, f"{KEY} = {config.speculation.draft_model!r}"
    assert spec is not None, "read as a head"
    layers = spec.layers_of(target.num_layers)
    if not all(0 <= layer <= target.num_layers for layer in layers):
        raise ConfigError(
            f"{given} reads hidden states around layers {list(layers)}, but the model has "
            f"{target.num_layers} layers; {REMEDY}"
        )
    if EMBEDDING not in headers and head.hidden_size != target.hidden_size:
        raise ConfigError(
            f"{given} has no embed_tokens of its own, and embeddings of {head.hidden_size} elements, but the "
            f"model's have {target.hidden_size}; {REMEDY}"
        )


class HeadRooms(msgspec.Struct, frozen=True, kw_only=True):
    """What a head keeps of each sequence, in a room of fixed size: no block of the cache is the head's."""

    num_rooms: int
    # Features that were not read yet.
    num_features: int
    # Blocks of its own keys and values, drafts included.
    num_blocks: int
    # Where drafts are a tree; its scratch blocks lie behind all rooms.
    tree: DraftTree | None

    @classmethod
    def of(cls, head: ModelSpec, config: EngineConfig) -> HeadRooms:
        """The rooms that the configuration leaves a head."""
        assert head.draft_head is not None, "read as a head"
        speculation, num_rooms = config.speculation, config.scheduler.max_num_seqs
        each = num_rooms * _feature_bytes(head.draft_head)
        num_features = max(_FEWEST_FEATURES, min(_FEATURE_BYTES // each, speculation.head_context_tokens))
        held = max(num_features, speculation.head_context_tokens) + speculation.num_draft_tokens
        return cls(
            num_rooms=num_rooms,
            num_features=num_features,
            num_blocks=-(-held // config.cache.block_size) + 1,
            tree=DraftTree.where_asked(config),
        )

    @property
    def num_forks(self) -> int:
        """Rows that a forward has beside one of each room, at most."""
        return 0 if self.tree is None else self.tree.num_branches

    @property
    def num_all_blocks(self) -> int:
        """Of all rooms, and scratch blocks."""
        return self.num_rooms * self.num_blocks + (0 if self.tree is None else self.tree.num_scratch_blocks)

    def num_bytes(self, head: ModelSpec, config: EngineConfig, kv_dtype: str) -> int:
        """Bytes of the rooms, and of the features of a step on their way there and of those that are read."""
        assert head.draft_head is not None, "read as a head"
        rows = self.num_rooms * self.num_features + config.scheduler.max_num_batched_tokens
        features = (rows + MAX_READ_TOKENS + self.num_forks) * _feature_bytes(head.draft_head)
        kept = self.num_all_blocks * config.cache.block_size * kv_bytes_per_token(head, kv_dtype)
        return features + kept + recent_bytes(head, kv_dtype, self.num_rooms + self.num_forks)


def _feature_bytes(spec: DraftHeadSpec | MedusaSpec | PredictionSpec) -> int:
    """What is kept of a token."""
    return len(spec.layers_of(0)) * spec.target_size * FLOAT_BYTES
