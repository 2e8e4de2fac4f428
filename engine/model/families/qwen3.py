"""Qwen3: norms on each head's queries and keys; heads need not divide the hidden size."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec
from engine.model.families.qwen2 import upper_windows
from engine.model.spec import ModelSpec


def read(config: ConfigReader) -> ModelSpec:
    """`Qwen3ForCausalLM`. Its heads have 128 dimensions unless stated."""
    bias = config.flag("attention_bias", False)
    head_dim = config.count("head_dim", 128)
    return decoder_spec(
        config,
        "Qwen3ForCausalLM",
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        ropes=(config.rope(head_dim),),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        windows=upper_windows(config),
    )
