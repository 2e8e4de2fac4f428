"""Bamba: Mamba 2 in most layers, attention of which half a head turns in the others."""

from __future__ import annotations

from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.families.base import attention_biases, decoder_spec, family, head_size, norm_eps
from engine.model.spec import CheckpointError, ModelSpec, StateSpec, TensorNames

_NAMES = TensorNames(
    renamed=(
        (r"\.mamba\.", ".state."),
        (r"\.feed_forward\.", ".mlp."),
        (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
        (r"^model\.final_layernorm\.", "model.norm."),
    )
)


@family("BambaForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Layers that attend are numbered by `attn_layer_indices`."""
    attending = config.numbers_of("attn_layer_indices") or ()
    layers = range(config.count("num_hidden_layers"))
    others = tuple(layer for layer in layers if layer not in attending)
    return decoder_spec(
        config,
        default_eps=1e-5,
        **attention_biases(config),
        mlp_bias=config.flag("mlp_bias", False),
        ropes=(config.rope(head_size(config), default_partial=0.5),),
        state=mamba2(config, others, default_eps=1e-5),
        attention_layers=tuple(layer for layer in layers if layer in attending),
        names=_NAMES,
    )


def mamba2(config: ConfigReader, layers: tuple[int, ...], *, default_eps: float = 1e-6) -> StateSpec | None:
    """Mamba 2 in these layers, under the names that Bamba and those after it have for its sizes."""
    if not layers:
        return None
    config.require("hidden_act", "silu", "silu")
    size = config.count("mamba_expand", 2) * config.count("hidden_size")
    heads, groups = config.count("mamba_n_heads", 128), config.count("mamba_n_groups", 1)
    config.require_multiple("mamba_expand * hidden_size", size, "mamba_n_heads", heads)
    config.require_multiple("mamba_n_heads", heads, "mamba_n_groups", groups)
    head_dim = config.values.get("mamba_d_head", "auto")
    if head_dim not in ("auto", None, size // heads):
        raise CheckpointError(
            f"{config.source}: mamba_d_head = {head_dim!r}, but mamba_expand * hidden_size / mamba_n_heads "
            f"is {size // heads}"
        )
    return mamba2_of(
        layers,
        num_heads=heads,
        num_groups=groups,
        key_dim=config.count("mamba_d_state", 256),
        value_dim=size // heads,
        taps=config.count("mamba_d_conv", 4),
        convolution_bias=config.flag("mamba_conv_bias", True),
        bias=config.flag("mamba_proj_bias", False),
        norm_size=size // groups,
        norm_eps=norm_eps(config, default_eps),
        step_limits=step_limits(config),
    )


def mamba2_of(
    layers: tuple[int, ...],
    *,
    num_heads: int,
    num_groups: int,
    key_dim: int,
    value_dim: int,
    gate_first: bool = True,
    **fields: Any,
) -> StateSpec:
    """Mamba 2 of these sizes."""
    return StateSpec(
        kind="mamba2",
        layers=layers,
        channels=num_heads * value_dim + 2 * num_groups * key_dim,
        num_heads=num_heads,
        num_groups=num_groups,
        key_dim=key_dim,
        value_dim=value_dim,
        gate_first=gate_first,
        **fields,
    )


def step_limits(config: ConfigReader) -> tuple[float, float]:
    """`time_step_limit`, which may end in infinity."""
    given = config.values.get("time_step_limit")
    if given is None:
        return 0.0, float("inf")
    limits = [_number(each) for each in given] if isinstance(given, list) else []
    if len(limits) != 2 or not limits[0] <= limits[1]:
        raise CheckpointError(f"{config.source}: time_step_limit = {given!r} is not two numbers that rise")
    return limits[0], limits[1]


def _number(value: Any) -> float:
    """A number, or infinity as newer configurations write it; NaN for what is none."""
    if isinstance(value, dict):
        value = {"Infinity": float("inf"), "-Infinity": float("-inf")}.get(str(value.get("__float__")))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")
