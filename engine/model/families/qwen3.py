"""Qwen3: norms on each head's queries and keys; heads need not divide the hidden size. Experts in all layers,
in every so many, or in none.
"""

from __future__ import annotations

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.base import attention_biases, decoder_spec, family
from engine.model.families.qwen2 import sparse_layers, upper_windows
from engine.model.spec import ExpertSpec, ModelSpec


@family("Qwen3ForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Heads have 128 dimensions unless stated."""
    return _read(config, 128)


@family("Qwen3MoeForCausalLM")
def read_moe(config: ConfigReader) -> ModelSpec:
    """Heads have hidden_size / num_attention_heads dimensions unless stated."""
    experts = ExpertSpec(
        num_experts=config.integer_of("num_experts", "num_local_experts"),
        num_active=config.count("num_experts_per_tok", 8),
        intermediate_size=config.count("moe_intermediate_size"),
        layers=sparse_layers(config),
        normalized=config.flag("norm_topk_prob", False),
    )
    spec = _read(config, config.count("hidden_size") // config.count("num_attention_heads"))
    return msgspec.structs.replace(spec, experts=experts)


def _read(config: ConfigReader, default_dim: int) -> ModelSpec:
    return decoder_spec(
        config,
        head_dim=config.count("head_dim", default_dim),
        **attention_biases(config),
        qk_norm="head",
        windows=upper_windows(config),
    )
