"""Jamba: Mamba with normed time steps, keys and queries in most layers; attention without rotation in the
others; experts in every second layer.
"""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import (
    decoder_spec,
    family,
    head_size,
    mixed_layers,
    norm_eps,
    some_rotate,
    sparse_of,
)
from engine.model.families.mamba import selective, step_rank
from engine.model.spec import ExpertSpec, ModelSpec, StateSpec, TensorNames

_NAMES = TensorNames(
    renamed=(
        (r"\.mamba\.", ".state."),
        (r"\.feed_forward\.router\.", ".mlp.gate."),
        (r"\.feed_forward\.", ".mlp."),
        (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
        (r"^model\.final_layernorm\.", "model.norm."),
    )
)


@family("JambaForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Jamba 1.7 and Jamba Reasoning; of one expert there is nothing to choose."""
    num_layers = config.count("num_hidden_layers")
    attends = _every(config, "attn_layer", 8, 4, num_layers)
    default = ["attention" if layer in attends else "mamba" for layer in range(num_layers)]
    attending, others = mixed_layers(config, default=default, state="mamba")
    num_experts = config.count("num_experts", 16)
    sparse = sparse_of(config, _every(config, "expert_layer", 2, 1, num_layers))
    experts = ExpertSpec(
        num_experts=num_experts,
        num_active=config.count("num_experts_per_tok", 2),
        intermediate_size=config.count("intermediate_size"),
        layers=sparse,
        normalized=False,
    )
    return decoder_spec(
        config,
        **some_rotate(config.turning_whole().rope(head_size(config)), [False] * num_layers),
        state=_state(config, others) if others else None,
        attention_layers=attending,
        experts=experts if sparse and num_experts > 1 else None,
        names=_NAMES,
    )


def _every(config: ConfigReader, name: str, period: int, offset: int, num_layers: int) -> tuple[int, ...]:
    """One layer of each period."""
    period, offset = config.count(f"{name}_period", period), config.integer(f"{name}_offset", offset)
    return tuple(layer for layer in range(num_layers) if layer % period == offset)


def _state(config: ConfigReader, layers: tuple[int, ...]) -> StateSpec:
    config.require("hidden_act", "silu", "silu")
    hidden = config.count("hidden_size")
    return selective(
        layers,
        channels=config.count("mamba_expand", 2) * hidden,
        taps=config.count("mamba_d_conv", 4),
        key_dim=config.count("mamba_d_state", 16),
        low_rank=step_rank(config, "mamba_dt_rank", hidden),
        convolution_bias=config.flag("mamba_conv_bias", True),
        bias=config.flag("mamba_proj_bias", False),
        norm_eps=norm_eps(config),
    )
