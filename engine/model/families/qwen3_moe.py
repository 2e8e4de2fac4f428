"""Qwen3 with experts in all, or in every so many, layers."""

from __future__ import annotations

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families import qwen3
from engine.model.spec import ExpertSpec, ModelSpec


def read(config: ConfigReader) -> ModelSpec:
    """`Qwen3MoeForCausalLM`. Heads have hidden_size / num_attention_heads dimensions unless stated."""
    num_layers = config.count("num_hidden_layers")
    default_dim = config.count("hidden_size") // config.count("num_attention_heads")
    stated = {"head_dim": config.count("head_dim", default_dim)}
    dense = config.values.get("mlp_only_layers") or []
    every = config.integer("decoder_sparse_step", 1)
    experts = ExpertSpec(
        num_experts=config.integer_of("num_experts", "num_local_experts"),
        num_active=config.count("num_experts_per_tok", 8),
        intermediate_size=config.count("moe_intermediate_size"),
        layers=tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % every == 0),
        normalized=config.flag("norm_topk_prob", False),
    )
    spec = qwen3.read(ConfigReader({**config.values, **stated}, config.source))
    return msgspec.structs.replace(spec, architecture="Qwen3MoeForCausalLM", experts=experts)
