"""Mistral, Llama with a sliding window in every layer; and Mixtral, which has experts as well."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec, family
from engine.model.spec import ExpertSpec, ModelSpec


@family("MistralForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Without experts."""
    return decoder_spec(config, windows=_windows(config))


@family("MixtralForCausalLM")
def read_mixtral(config: ConfigReader) -> ModelSpec:
    """With eight experts, of which two are active."""
    experts = ExpertSpec(
        num_experts=config.integer_of("num_local_experts", "num_experts"),
        num_active=config.count("num_experts_per_tok", 2),
        intermediate_size=config.integer("intermediate_size"),
        layers=tuple(range(config.count("num_hidden_layers"))),
        layout="mixtral",
    )
    return decoder_spec(config, default_eps=1e-5, windows=_windows(config), experts=experts)


def _windows(config: ConfigReader) -> tuple[int | None, ...]:
    return (config.optional_integer("sliding_window"),) * config.count("num_hidden_layers")
