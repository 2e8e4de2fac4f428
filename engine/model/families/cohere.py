"""Command R (Cohere) and Command R7B/A (Cohere 2): layer norms without biases, half layers side by side."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.base import (
    attention_biases,
    decoder_spec,
    family,
    head_size,
    layer_norms,
    some_rotate,
    windows_of,
)
from engine.model.spec import ModelSpec, RopeSpec


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


def _rope(config: ConfigReader, default_theta: float) -> RopeSpec:
    rope = config.rope(head_size(config), default_theta=default_theta)
    return msgspec.structs.replace(rope, interleaved=True)


def _shared(config: ConfigReader) -> dict[str, Any]:
    return {
        **attention_biases(config),
        **layer_norms(config, bias=False),
        "norm_placement": "parallel_shared",
        "logit_scale": config.number("logit_scale", 0.0625),
        "tied_embeddings": config.flag("tie_word_embeddings", True),
    }
