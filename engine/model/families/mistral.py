"""Mistral, Llama with a sliding window in every layer; Ministral, with one in some; Ministral 3 and Mistral
Small 4, whose queries grow with their positions; and Mixtral, which has experts.
"""

from __future__ import annotations

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec, family, head_size, windows_of
from engine.model.families.deepseek import corrected_routing, read_latent, routed_experts
from engine.model.spec import ExpertSpec, ModelSpec, QueryGrowth, RopeSpec


@family("MistralForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Without experts."""
    config = config.completed(sliding_window=4096, num_key_value_heads=8)
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
    own = {"rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16_384}
    config = config.turned(_ROTATION | own)
    head_dim = config.count("head_dim", 128)
    rope = _growing(config, config.rope(head_dim, default_theta=1_000_000.0))
    return decoder_spec(config, default_eps=1e-5, head_dim=head_dim, ropes=(rope,), windows=_windows(config))


# What configurations of Mistral Small 4 may leave out.
_OF_MISTRAL4 = {
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "n_shared_experts": 1,
}
_ROTATION = {
    "rope_type": "yarn",
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@family("Mistral4ForCausalLM")
def read_mistral4(config: ConfigReader) -> ModelSpec:
    """Mistral Small 4: DeepSeek's latent attention and experts, chosen by softmax."""
    config = config.having({**_OF_MISTRAL4, **config.values}).turned(_ROTATION)
    # A share of queries and keys, of which the other part is a tensor of its own here.
    config = config.turning_whole()
    routing = corrected_routing(config, num_groups=1, num_active_groups=1)
    routing |= {"scoring": "softmax", "correction_bias": False}
    experts = routed_experts(config, routing)
    if config.text("experts_layout", "") == "fused":
        experts = msgspec.structs.replace(experts, layout="fused")
    spec = read_latent(config, experts, interleaved=config.flag("rope_interleave", True))
    (rope,) = spec.ropes
    return msgspec.structs.replace(spec, ropes=(_growing(config, rope),))


def _growing(config: ConfigReader, rope: RopeSpec) -> RopeSpec:
    """The rotation with the growth of queries that stands beside it."""
    parameters = ConfigReader(rope.parameters, f"{config.source}: rope_parameters")
    beta = parameters.number("llama_4_scaling_beta", 0.0)
    if not beta:
        return rope
    length = parameters.count("original_max_position_embeddings")
    return msgspec.structs.replace(rope, query_growth=QueryGrowth(beta=beta, length=length))


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
    ropes = (config.rope(head_size(config), default_theta=1_000_000.0),)
    return decoder_spec(config, default_eps=1e-5, ropes=ropes, windows=_windows(config), experts=experts)


def _windows(config: ConfigReader) -> tuple[int | None, ...]:
    return (config.optional_integer("sliding_window"),) * config.count("num_hidden_layers")
