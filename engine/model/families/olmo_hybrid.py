"""OLMo Hybrid: the gated delta rule in most layers, with norms before the half layers; attention in the
others, with norms behind them.
"""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import (
    attention_biases,
    decoder_spec,
    family,
    head_size,
    mixed_layers,
    some_rotate,
)
from engine.model.spec import ModelSpec, StateSpec, TensorNames

# Of the norm behind a scan, whatever config.json says of the others.
_SCAN_NORM_EPS = 1e-5
_NAMES = TensorNames(
    renamed=(
        (r"\.linear_attn\.", ".state."),
        (r"\.state\.o_proj\.", ".state.out_proj."),
        (r"\.state\.o_norm\.", ".state.norm."),
        (r"\.attention_layer_norm\.", ".input_layernorm."),
        (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    ),
    skipped=r"mtp\.",
)


@family("OlmoHybridForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Rotation but where its base is null."""
    num_layers, num_heads = config.count("num_hidden_layers"), config.count("num_attention_heads")
    config.require("hidden_act", "silu", "silu")
    default = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(num_layers)]
    if "full_attention" not in default:
        default[-1] = "full_attention"
    attending, others = mixed_layers(config, default=default, state="linear_attention")
    stated = config.values.get("rope_parameters") or config.values.get("rope_scaling")
    stated = stated if isinstance(stated, dict) and "rope_theta" in stated else config.values
    turns = stated.get("rope_theta", 0) is not None
    return decoder_spec(
        config,
        **attention_biases(config),
        **some_rotate(config.rope(head_size(config)), [turns] * num_layers),
        qk_norm="full",
        norm_placement="post",
        state_norm_placement="pre",
        state=_state(config, others, num_heads) if others else None,
        attention_layers=attending,
        names=_NAMES,
    )


def _state(config: ConfigReader, layers: tuple[int, ...], num_heads: int) -> StateSpec:
    """The gated delta rule, whose gains may reach two."""
    heads, groups = (
        config.count("linear_num_value_heads", num_heads),
        config.count("linear_num_key_heads", num_heads),
    )
    config.require_multiple("linear_num_value_heads", heads, "linear_num_key_heads", groups)
    key_dim = config.count("linear_key_head_dim", int(0.75 * config.count("hidden_size") / groups))
    value_dim = config.count("linear_value_head_dim", 2 * key_dim)
    return StateSpec(
        kind="delta",
        layers=layers,
        taps=config.count("linear_conv_kernel_dim", 4),
        channels=2 * groups * key_dim + heads * value_dim,
        num_heads=heads,
        num_groups=groups,
        key_dim=key_dim,
        value_dim=value_dim,
        layout="apart",
        gain_scale=2.0 if config.flag("linear_allow_neg_eigval", True) else 1.0,
        norm_size=value_dim,
        norm_eps=_SCAN_NORM_EPS,
    )
