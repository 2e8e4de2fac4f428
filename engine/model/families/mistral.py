"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec
from engine.model.spec import ModelSpec


def read(config: ConfigReader) -> ModelSpec:
    """`MistralForCausalLM`."""
    window = config.optional_integer("sliding_window")
    return decoder_spec(config, "MistralForCausalLM", windows=(window,) * config.count("num_hidden_layers"))
