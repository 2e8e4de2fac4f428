"""Llama 2 and 3.x: grouped-query attention, every rope scaling, optional biases."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import attention_biases, decoder_spec, family
from engine.model.spec import ModelSpec


@family("LlamaForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Llama and what calls itself so."""
    config.require("pretraining_tp", 1, 1)
    return decoder_spec(config, **attention_biases(config), mlp_bias=config.flag("mlp_bias", False))
