"""Seed-OSS: Llama with biases on q, k and v, and heads of a size of their own."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec, family
from engine.model.spec import ModelSpec


@family("SeedOssForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """The output of attention has its own switch."""
    config.require("pretraining_tp", 1, 1)
    return decoder_spec(
        config,
        head_dim=config.count("head_dim", 128),
        qkv_bias=config.flag("attention_bias", True),
        output_bias=config.flag("attention_out_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
    )
