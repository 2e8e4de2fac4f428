"""Phi-3.5-MoE: Mixtral's experts, chosen by SparseMixer, under layer norms."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import (
    NORM_EPS_KEY,
    attention_biases,
    decoder_spec,
    family,
    head_size,
    layer_norms,
)
from engine.model.spec import ExpertSpec, ModelSpec


@family("PhimoeForCausalLM")
@family("PhiMoEForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Its hub's own code has the second name."""
    num_layers = config.count("num_hidden_layers")
    experts = ExpertSpec(
        num_experts=config.count("num_local_experts", 16),
        num_active=config.count("num_experts_per_tok", 2),
        intermediate_size=config.count("intermediate_size"),
        layers=tuple(range(num_layers)),
        scoring="sparse_mixer",
        tolerance=2 * config.number("router_jitter_noise", 0.01),
        layout="mixtral",
    )
    return decoder_spec(
        config,
        **layer_norms(config, NORM_EPS_KEY),
        **attention_biases(config),
        ropes=(config.rope(head_size(config), default_theta=1_000_000.0),),
        windows=(config.optional_integer("sliding_window"),) * num_layers,
        head_bias=config.flag("lm_head_bias", False),
        experts=experts,
    )
