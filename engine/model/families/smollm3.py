"""SmolLM3: every fourth layer has no rotation."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import (
    attention_biases,
    decoder_spec,
    family,
    head_size,
    rotating_layers,
    some_rotate,
    windows_of,
)
from engine.model.spec import ModelSpec


@family("SmolLM3ForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Windows, where there are some, are in layers without rotation."""
    num_layers = config.count("num_hidden_layers")
    rotates = rotating_layers(config, num_layers)
    windows: tuple[int | None, ...] = (None,) * num_layers
    if config.flag("use_sliding_window", False) and config.optional_integer("sliding_window"):
        default = [not turns for turns in rotates]
        windows = windows_of(config, default=default, window=config.integer("sliding_window"))
    return decoder_spec(
        config,
        **attention_biases(config),
        **some_rotate(config.rope(head_size(config), default_theta=2_000_000.0), rotates),
        mlp_bias=config.flag("mlp_bias", False),
        windows=windows,
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )
