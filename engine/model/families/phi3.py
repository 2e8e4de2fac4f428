"""Phi-3 and Phi-4-mini: fused projections, partial rotation, longrope."""

from __future__ import annotations

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec, family
from engine.model.spec import ModelSpec


@family("Phi3ForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Early checkpoints call longrope "su" or "yarn"."""
    stated = config.table("rope_parameters") or config.table("rope_scaling")
    if "original_max_position_embeddings" not in stated:
        config = config.completed(original_max_position_embeddings=4096)
    rope = config.rope(
        config.count("hidden_size") // config.count("num_attention_heads"), default_partial=1.0
    )
    if rope.kind in ("su", "yarn"):
        rope = msgspec.structs.replace(rope, kind="longrope")
    return decoder_spec(
        config,
        default_eps=1e-5,
        ropes=(rope,),
        windows=(config.optional_integer("sliding_window"),) * config.count("num_hidden_layers"),
        fused_qkv="whole",
        fused_gate_up=True,
    )
