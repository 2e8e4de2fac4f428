"""Llama 2 and 3.x: grouped-query attention, every rope scaling, optional biases."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec
from engine.model.spec import ModelSpec


def read(config: ConfigReader) -> ModelSpec:
    """`LlamaForCausalLM`."""
    config.require("pretraining_tp", 1, 1)
    bias = config.flag("attention_bias", False)
    return decoder_spec(
        config,
        "LlamaForCausalLM",
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
    )
