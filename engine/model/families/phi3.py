"""Phi-3 and Phi-4-mini: fused projections, partial rotation, longrope."""

from __future__ import annotations

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec
from engine.model.spec import ModelSpec


def read(config: ConfigReader) -> ModelSpec:
    """`Phi3ForCausalLM`. Early checkpoints call longrope "su" or "yarn"."""
    num_heads = config.count("num_attention_heads")
    rope = config.rope(config.count("hidden_size") // num_heads)
    if rope.kind in ("su", "yarn"):
        rope = msgspec.structs.replace(rope, kind="longrope")
    window = config.optional_integer("sliding_window")
    return decoder_spec(
        config,
        "Phi3ForCausalLM",
        norm_eps=config.number("rms_norm_eps", 1e-5),
        ropes=(rope,),
        windows=(window,) * config.count("num_hidden_layers"),
        fused_projections=True,
    )
