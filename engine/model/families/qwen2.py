"""Qwen2 and Qwen2.5: biases on q, k and v; optional sliding windows in the upper layers."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec, family, windows_of
from engine.model.spec import ModelSpec


@family("Qwen2ForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Qwen2 and Qwen2.5."""
    return decoder_spec(config, qkv_bias=True, windows=upper_windows(config))


def upper_windows(config: ConfigReader) -> tuple[int | None, ...]:
    """Windows from layer `max_window_layers` upwards, when `use_sliding_window` is set."""
    num_layers = config.count("num_hidden_layers")
    if not config.flag("use_sliding_window", False):
        return (None,) * num_layers
    first = config.integer("max_window_layers", 28)
    window = config.integer("sliding_window", 4096)
    return windows_of(config, default=[layer >= first for layer in range(num_layers)], window=window)
