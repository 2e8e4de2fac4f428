"""OLMo 2: norms after the half layers, queries and keys normed over all heads together."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec
from engine.model.spec import ModelSpec


def read(config: ConfigReader) -> ModelSpec:
    """`Olmo2ForCausalLM`."""
    bias = config.flag("attention_bias", False)
    return decoder_spec(
        config,
        "Olmo2ForCausalLM",
        norm_eps=config.number("rms_norm_eps", 1e-5),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="full",
        norm_placement="post",
    )
