"""Mistral, Llama with a sliding window in every layer; Ministral, with one in some; Ministral 3, whose
queries grow with their positions; and Mixtral, which has experts.
"""

from __future__ import annotations

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec, family, windows_of
from engine.model.spec import ExpertSpec, ModelSpec, QueryGrowth


@family("MistralForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Without experts."""
    return decoder_spec(config, windows=_windows(config))


@family("MinistralForCausalLM")
def read_ministral(config: ConfigReader) -> ModelSpec:
    """`layer_types` says which layers slide: all unless stated."""
    num_layers, window = config.count("num_hidden_layers"), config.optional_integer("sliding_window")
    windows = windows_of(config, default=[window is not None] * num_layers, window=window)
    return decoder_spec(config, windows=windows)


@family("Ministral3ForCausalLM")
def read_ministral3(config: ConfigReader) -> ModelSpec:
    """Ministral 3 and Mistral Small 4's kin."""
    head_dim = config.count("head_dim", 128)
    rope = config.rope(head_dim, default_theta=1_000_000.0)
    parameters = ConfigReader(rope.parameters, f"{config.source}: rope_parameters")
    beta = parameters.number("llama_4_scaling_beta", 0.0)
    if beta:
        length = parameters.count("original_max_position_embeddings")
        rope = msgspec.structs.replace(rope, query_growth=QueryGrowth(beta=beta, length=length))
    return decoder_spec(config, default_eps=1e-5, head_dim=head_dim, ropes=(rope,), windows=_windows(config))


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
