"""Helium: Llama that rotates neighbours together."""

from __future__ import annotations

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec, family, head_size
from engine.model.spec import ModelSpec


@family("HeliumForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Helium-1."""
    rope = config.rope(head_size(config, 128), default_theta=100_000.0)
    return decoder_spec(
        config,
        default_eps=1e-8,
        head_dim=head_size(config, 128),
        ropes=(msgspec.structs.replace(rope, interleaved=True),),
        qkv_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
    )
