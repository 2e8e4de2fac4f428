"""Command R (Cohere), Command R7B/A (Cohere 2) and Cohere 2 with experts: layer norms without biases, half
layers side by side.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.base import (
    NORM_EPS_KEY,
    attention_biases,
    decoder_spec,
    family,
    head_size,
    layer_norms,
    some_rotate,
    sparse_of,
    windows_of,
)
from engine.model.spec import CheckpointError, ExpertSpec, ModelSpec, RopeSpec


@family("CohereForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Larger ones norm queries and keys, each head by weights of its own."""
    return decoder_spec(
        config,
        **_shared(config),
        ropes=(_rope(config, 500_000.0),),
        qk_norm="each" if config.flag("use_qk_norm", False) else "none",
    )


@family("Cohere2ForCausalLM")
def read_cohere2(config: ConfigReader) -> ModelSpec:
    """Three of four layers slide and rotate, the others do neither."""
    config.require("use_qk_norm", False, False)
    config.require("use_parallel_block", True, True)
    config.require("use_gated_activation", True, True)
    every = config.count("sliding_window_pattern", 4)
    windows = windows_of(
        config,
        default=[(layer + 1) % every != 0 for layer in range(config.count("num_hidden_layers"))],
        window=config.integer("sliding_window", 4096),
    )
    rotates = [window is not None for window in windows]
    return decoder_spec(
        config, **_shared(config), **some_rotate(_rope(config, 10_000.0), rotates), windows=windows
    )


@family("Cohere2MoeForCausalLM")
def read_experts(config: ConfigReader) -> ModelSpec:
    """The first layers may be dense, and have a pattern of windows of their own; where that has none, they
    rotate and look at everything.
    """
    num_layers, first = config.count("num_hidden_layers"), config.integer("first_k_dense_replace", 0)
    own = config.count("prefix_dense_sliding_window_pattern", 1)
    every = config.count("sliding_window_pattern", 4)
    windows = windows_of(
        config,
        default=[
            (layer + 1) % own != 0 if layer < first else (layer - first + 1) % every != 0
            for layer in range(num_layers)
        ],
        window=config.integer("sliding_window", 4096),
    )
    sparse = sparse_of(config, range(first, num_layers))
    rotates = [
        window is not None or (own == 1 and layer not in sparse) for layer, window in enumerate(windows)
    ]
    size, dense = config.count("intermediate_size"), config.optional_integer("prefix_dense_intermediate_size")
    fields = _shared(config)
    if config.optional_number(NORM_EPS_KEY) is not None:
        fields |= {"norm": "rms", "norm_eps": config.number(NORM_EPS_KEY)}
    return decoder_spec(
        config,
        **fields,
        **some_rotate(_rope(config, 10_000.0, 128), rotates),
        head_dim=config.count("head_dim", 128),
        windows=windows,
        intermediate_size=dense or size,
        experts=_experts(config, size, sparse) if sparse else None,
    )


def _experts(config: ConfigReader, size: int, layers: tuple[int, ...]) -> ExpertSpec:
    """Experts whose logits choose, beside shared ones, with which they may be averaged."""
    scoring = config.text("expert_selection_fn", "softmax")
    if scoring not in ("softmax", "sigmoid"):
        raise CheckpointError(
            f"{config.source}: expert_selection_fn = {scoring!r} is not supported, only softmax and sigmoid"
        )
    shared = config.integer("num_shared_experts", 0)
    way = config.text("shared_expert_combination_strategy", "average")
    if shared and way not in ("sum", "average"):
        raise CheckpointError(
            f"{config.source}: shared_expert_combination_strategy = {way!r} is not supported, only sum and "
            "average"
        )
    averages = bool(shared) and way == "average"
    return ExpertSpec(
        num_experts=config.integer_of("num_experts", "num_local_experts"),
        num_active=config.count("num_experts_per_tok", 2),
        intermediate_size=size,
        layers=layers,
        scoring="softmax" if scoring == "softmax" else "sigmoid",
        # A softmax over the best alone.
        normalized=scoring == "softmax" or config.flag("norm_topk_prob", True),
        scaling=0.5 if averages else 1.0,
        shared_intermediate_size=size * shared,
        halves_shared=averages,
    )


def _rope(config: ConfigReader, default_theta: float, default_head: int | None = None) -> RopeSpec:
    rope = config.rope(head_size(config, default_head), default_theta=default_theta)
    return msgspec.structs.replace(rope, interleaved=True)


def _shared(config: ConfigReader) -> dict[str, Any]:
    return {
        **attention_biases(config),
        **layer_norms(config, bias=False),
        "norm_placement": "parallel_shared",
        "logit_scale": config.number("logit_scale", 0.0625),
        "tied_embeddings": config.flag("tie_word_embeddings", True),
    }
