"""Hunyuan (V1): norms of queries and keys after the rotation; dense, and with experts."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.base import attention_biases, decoder_spec, family
from engine.model.spec import CheckpointError, ExpertSpec, ModelSpec, RopeSpec, TensorNames

_NAMES = TensorNames(
    renamed=(
        (r"\.query_layernorm\.", ".q_norm."),
        (r"\.key_layernorm\.", ".k_norm."),
        (r"\.mlp\.gate\.wg\.", ".mlp.gate."),
        (r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."),
    )
)


@family("HunYuanDenseV1ForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Without experts."""
    return decoder_spec(config, **_shared(config))


@family("HunYuanMoEV1ForCausalLM")
def read_experts(config: ConfigReader) -> ModelSpec:
    """With experts in every layer, and one that every token passes."""
    num_layers, size = config.count("num_hidden_layers"), config.count("intermediate_size")
    if _one(config, "moe_intermediate_size", size) != size or _one(config, "num_shared_expert", 1) != 1:
        raise CheckpointError(
            f"{config.source}: moe_intermediate_size other than intermediate_size = {size} and "
            "num_shared_expert other than 1 are not supported"
        )
    experts = ExpertSpec(
        num_experts=_one(config, "num_experts", 1),
        num_active=_one(config, "moe_topk", 1),
        intermediate_size=size,
        layers=tuple(range(num_layers)),
        shared_intermediate_size=size,
    )
    return decoder_spec(config, **_shared(config), experts=experts)


def _one(config: ConfigReader, key: str, default: int) -> int:
    """A number, or a list of the same number for every layer."""
    listed = config.values.get(key)
    if not isinstance(listed, list):
        return config.count(key, default)
    if len(set(map(str, listed))) != 1:
        raise CheckpointError(f"{config.source}: {key} differs between layers, which is not supported")
    return ConfigReader({key: listed[0]}, config.source).count(key)


def _shared(config: ConfigReader) -> dict[str, Any]:
    config.require("use_cla", False, False)
    config.require("use_mla", False, False)
    config.require("use_qk_norm", True, True)
    config = config.aliased(head_dim="head_dim" if config.values.get("head_dim") else "attention_head_dim")
    head_dim = config.count("head_dim", config.count("hidden_size") // config.count("num_attention_heads"))
    return {
        **attention_biases(config),
        "head_dim": head_dim,
        "ropes": (_with_base(config, config.rope(head_dim)),),
        "default_eps": 1e-5,
        "qk_norm": "head",
        "qk_norm_last": True,
        "names": _NAMES,
    }


def _with_base(config: ConfigReader, rope: RopeSpec) -> RopeSpec:
    """What these checkpoints call dynamic is a larger base, the same at every length."""
    alpha = rope.parameters.get("alpha")
    if rope.kind != "dynamic" or not alpha:
        return rope
    if not isinstance(alpha, int | float) or alpha <= 0:
        raise CheckpointError(f"{config.source}: rope scaling alpha = {alpha!r} is not a number above 0")
    theta = rope.theta * float(alpha) ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return msgspec.structs.replace(rope, kind="default", theta=theta, parameters={})
