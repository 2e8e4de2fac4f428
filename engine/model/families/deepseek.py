"""DeepSeek-V2 and V3: latent attention, shared and routed experts, grouped routing."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.base import attention_biases, decoder_spec, family
from engine.model.spec import CheckpointError, ExpertSpec, LatentSpec, ModelSpec, RopeSpec, yarn_magnitude


@family("DeepseekV2ForCausalLM")
def read_v2(config: ConfigReader) -> ModelSpec:
    """Softmax scores, the best groups by their best expert."""
    config.require("norm_topk_prob", False, False)
    method = config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise CheckpointError(f"{config.source}: topk_method = {method!r} is not supported")
    groups = {}
    if method == "group_limited_greedy":
        groups = {"num_groups": config.integer("n_group"), "num_active_groups": config.integer("topk_group")}
    return _read(config, {"normalized": False, **groups}, interleaved=True)


@family("DeepseekV3ForCausalLM")
def read_v3(config: ConfigReader) -> ModelSpec:
    """Sigmoid scores with a correction in the choice, groups by their two best experts."""
    routing = {
        "scoring": "sigmoid",
        "correction_bias": True,
        "normalized": config.flag("norm_topk_prob", True),
        "num_groups": config.integer("n_group", 8),
        "num_active_groups": config.integer("topk_group", 4),
        "group_score": "two_best",
    }
    return _read(config, routing, interleaved=config.flag("rope_interleave", True))


def _read(config: ConfigReader, routing: dict[str, Any], *, interleaved: bool) -> ModelSpec:
    num_layers = config.count("num_hidden_layers")
    latent = LatentSpec(
        query_rank=config.optional_integer("q_lora_rank") or 0,
        kv_rank=config.count("kv_lora_rank", 512),
        nope_dim=config.count("qk_nope_head_dim", 128),
        rope_dim=config.count("qk_rope_head_dim", 64),
        value_dim=config.count("v_head_dim", 128),
    )
    rope = msgspec.structs.replace(config.rope(latent.rope_dim), interleaved=interleaved)
    expert_size = config.count("moe_intermediate_size")
    experts = ExpertSpec(
        num_experts=config.integer_of("n_routed_experts", "num_local_experts", "num_experts"),
        num_active=config.count("num_experts_per_tok"),
        intermediate_size=expert_size,
        layers=tuple(range(config.integer("first_k_dense_replace", 0), num_layers)),
        scaling=config.number("routed_scaling_factor", 1.0),
        shared_intermediate_size=expert_size * config.integer("n_shared_experts", 0),
        **routing,
    )
    head_dim = latent.nope_dim + latent.rope_dim
    return decoder_spec(
        config,
        head_dim=head_dim,
        ropes=(rope,),
        attention_scale=head_dim**-0.5 * _magnitude(rope) ** 2,
        **attention_biases(config),
        latent=latent,
        experts=experts,
    )


def _magnitude(rope: RopeSpec) -> float:
    """YaRN's correction of the score scale, where `mscale_all_dim` asks for it."""
    factor, coefficient = rope.parameters.get("factor"), rope.parameters.get("mscale_all_dim")
    if (
        rope.kind == "default"
        or not isinstance(coefficient, int | float)
        or not isinstance(factor, int | float)
    ):
        return 1.0
    return yarn_magnitude(float(factor), float(coefficient)) if coefficient else 1.0
