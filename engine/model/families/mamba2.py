"""Mamba 2 in every layer, and nothing else."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.bamba import mamba2_of, step_limits
from engine.model.families.base import family, states_alone
from engine.model.families.mamba import NAMES, inner_size
from engine.model.spec import CheckpointError, ModelSpec


@family("Mamba2ForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Mamba 2 and Codestral Mamba; `norm_before_gate` of older configurations was never computed by."""
    config.require("hidden_act", "silu", "silu")
    num_layers, hidden = config.count("num_hidden_layers"), config.count("hidden_size")
    heads, value_dim = config.count("num_heads", 128), config.count("head_dim", 64)
    groups, size = config.count("n_groups", 8), inner_size(config, hidden)
    if heads * value_dim != size:
        raise CheckpointError(
            f"{config.source}: num_heads * head_dim = {heads * value_dim}, but expand * hidden_size is {size}"
        )
    config.require_multiple("num_heads", heads, "n_groups", groups)
    eps = config.number("layer_norm_epsilon", 1e-5)
    state = mamba2_of(
        tuple(range(num_layers)),
        num_heads=heads,
        num_groups=groups,
        key_dim=config.count("state_size", 128),
        value_dim=value_dim,
        taps=config.count("conv_kernel", 4),
        convolution_bias=config.flag("use_conv_bias", True),
        bias=config.flag("use_bias", False),
        norm_size=size // groups,
        norm_eps=eps,
        step_limits=step_limits(config),
    )
    return states_alone(config, state, eps=eps, names=NAMES)
