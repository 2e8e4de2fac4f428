"""Mixtral: Mistral with eight experts of which two are active."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec
from engine.model.spec import ExpertSpec, ModelSpec


def read(config: ConfigReader) -> ModelSpec:
    """`MixtralForCausalLM`."""
    num_layers = config.count("num_hidden_layers")
    experts = ExpertSpec(
        num_experts=config.integer_of("num_local_experts", "num_experts"),
        num_active=config.count("num_experts_per_tok", 2),
        intermediate_size=config.integer("intermediate_size"),
        layers=tuple(range(num_layers)),
        layout="mixtral",
    )
    return decoder_spec(
        config,
        "MixtralForCausalLM",
        norm_eps=config.number("rms_norm_eps", 1e-5),
        windows=(config.optional_integer("sliding_window"),) * num_layers,
        experts=experts,
    )
