"""GLM 4 and later: a part of each head is rotated; dense, with experts, and with latent attention besides."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec, family, head_size
from engine.model.families.deepseek import (
    corrected_routing,
    listed_sparse,
    prediction,
    read_latent,
    routed_experts,
)
from engine.model.spec import ModelSpec, TensorNames

_SANDWICH = TensorNames(
    renamed=(
        (r"\.post_attention_layernorm\.", ".pre_feedforward_layernorm."),
        (r"\.post_self_attn_layernorm\.", ".post_attention_layernorm."),
        (r"\.post_mlp_layernorm\.", ".post_feedforward_layernorm."),
    )
)


@family("GlmForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """GLM-4-9B and GLM-Edge."""
    return decoder_spec(config, **_dense(config))


@family("Glm4ForCausalLM")
def read_glm4(config: ConfigReader) -> ModelSpec:
    """GLM-4-0414: norms before and after the half layers."""
    return decoder_spec(config, **_dense(config), norm_placement="sandwich", names=_SANDWICH)


@family("Glm4MoeForCausalLM")
def read_experts(config: ConfigReader) -> ModelSpec:
    """GLM-4.5 to 4.7: routing as DeepSeek-V3 has it."""
    return decoder_spec(
        config,
        default_eps=1e-5,
        ropes=(config.rope(head_size(config), default_partial=0.5),),
        qkv_bias=config.flag("attention_bias", False),
        qk_norm="head" if config.flag("use_qk_norm", False) else "none",
        experts=routed_experts(config, corrected_routing(config, num_groups=1, num_active_groups=1)),
        **prediction(config),
    )


@family("Glm4MoeLiteForCausalLM")
def read_lite(config: ConfigReader) -> ModelSpec:
    """GLM-4.7-Flash: DeepSeek-V3's attention as well."""
    routing = corrected_routing(config, num_groups=1, num_active_groups=1)
    experts = listed_sparse(config, routed_experts(config, routing, default_dense=1))
    return read_latent(config, experts, interleaved=config.flag("rope_interleave", True), default_eps=1e-5)


def _dense(config: ConfigReader) -> dict[str, Any]:
    rope = config.rope(head_size(config, 128), default_partial=0.5)
    return {
        "head_dim": config.count("head_dim", 128),
        "ropes": (msgspec.structs.replace(rope, interleaved=True),),
        "default_eps": 1.5625e-7,
        "qkv_bias": config.flag("attention_bias", True),
        "fused_gate_up": True,
    }
