"""Llama 2 and 3.x: grouped-query attention, every rope scaling, optional biases."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import attention_biases, decoder_spec, family
from engine.model.spec import ModelSpec


@family("IQuestCoderForCausalLM")
def read_iquest_coder(config: ConfigReader) -> ModelSpec:
    """Llama, whose own code has two things more that no checkpoint has asked for."""
    config.require("clip_qkv", None, None)
    config.require("use_sliding_window", False, False)
    return read(_with_heads(config))


@family("InternLM3ForCausalLM")
def read_internlm3(config: ConfigReader) -> ModelSpec:
    """Llama, whose own code calls biases otherwise."""
    config = _with_heads(config.aliased(attention_bias="qkv_bias", mlp_bias="bias"))
    # One of them is that of the product behind attention, too.
    config.require("mlp_bias", config.flag("attention_bias", False), False)
    return read(config)


def _with_heads(config: ConfigReader) -> ConfigReader:
    return ConfigReader({"head_dim": 128, **config.values}, config.source)


@family("LlamaForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Llama and what calls itself so."""
    config.require("pretraining_tp", 1, 1)
    return decoder_spec(config, **attention_biases(config), mlp_bias=config.flag("mlp_bias", False))
