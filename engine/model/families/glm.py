"""GLM 4 and later: a part of each head is rotated; dense, with experts, and with latent attention besides,
whose positions an indexer may choose.
"""

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
    with_indexer,
)
from engine.model.spec import CheckpointError, ModelSpec, TensorNames

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
    config = config.completed(num_key_value_heads=2)
    return decoder_spec(config, **_dense(config))


@family("Glm4ForCausalLM")
def read_glm4(config: ConfigReader) -> ModelSpec:
    """GLM-4-0414: norms before and after the half layers."""
    config = config.completed(num_key_value_heads=2)
    return decoder_spec(config, **_dense(config), norm_placement="sandwich", names=_SANDWICH)


@family("Glm4MoeForCausalLM")
def read_experts(config: ConfigReader) -> ModelSpec:
    """GLM-4.5 to 4.7: routing as DeepSeek-V3 has it."""
    config = config.completed(first_k_dense_replace=1, n_shared_experts=1)
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
    config = config.completed(
        q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256, n_shared_experts=1, routed_scaling_factor=1.8
    )
    routing = corrected_routing(config, num_groups=1, num_active_groups=1)
    experts = listed_sparse(config, routed_experts(config, routing, default_dense=1))
    return read_latent(config, experts, interleaved=config.flag("rope_interleave", True), default_eps=1e-5)


@family("GlmMoeDsaForCausalLM")
def read_indexed(config: ConfigReader) -> ModelSpec:
    """GLM-5: attention over positions that an indexer chooses, in some layers for those behind them."""
    config = config.completed(q_lora_rank=2048, qk_nope_head_dim=192, v_head_dim=256)
    routing = corrected_routing(config, num_groups=1, num_active_groups=1)
    experts = listed_sparse(
        config, routed_experts(config, routing, default_dense=3, default_scaling=2.5, default_shared=1)
    )
    config.require("indexer_rope_interleave", True, True)
    spec = read_latent(config, experts, interleaved=True, default_eps=1e-5)
    return with_indexer(config, spec, num_heads=32, interleaved=True, without=_sharing(config))


def _sharing(config: ConfigReader) -> tuple[int, ...]:
    """Layers without an indexer: those that `indexer_types` calls shared, or a pattern's letter S; or all but
    every so many.
    """
    num_layers = config.count("num_hidden_layers")
    key = "indexer_types" if config.values.get("indexer_types") is not None else "index_topk_pattern"
    given = kinds = config.values.get(key)
    if kinds is None:
        every, offset = (
            max(config.integer("index_topk_freq", 1), 1),
            config.integer("index_skip_topk_offset", 2),
        )
        kinds = ["shared" if max(layer - offset + 1, 0) % every else "full" for layer in range(num_layers)]
    if isinstance(kinds, str):
        kinds = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in kinds]
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not set(map(str, kinds)) <= {"full", "shared"}
    ):
        raise CheckpointError(
            f"{config.source}: {key} must name {num_layers} layers full or shared, got {given!r}"
        )
    if kinds[0] == "shared":
        raise CheckpointError(f"{config.source}: {key}: no layer before the first one chooses for it")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "shared")


def _dense(config: ConfigReader) -> dict[str, Any]:
    rope = config.rope(head_size(config, 128), default_partial=0.5)
    return {
        "head_dim": config.count("head_dim", 128),
        "ropes": (msgspec.structs.replace(rope, interleaved=True),),
        "default_eps": 1.5625e-7,
        "qkv_bias": config.flag("attention_bias", True),
        "fused_gate_up": True,
    }
