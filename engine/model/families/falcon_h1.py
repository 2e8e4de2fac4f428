"""Falcon-H1: attention and Mamba 2 side by side in every layer, and multipliers of nearly everything."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.bamba import mamba2_of, step_limits
from engine.model.families.base import decoder_spec, family, head_size, norm_eps
from engine.model.spec import CheckpointError, ModelSpec, TensorNames, WeightFactors

_NAMES = TensorNames(
    renamed=(
        (r"\.mamba\.", ".state."),
        (r"\.feed_forward\.", ".mlp."),
        (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
        (r"^model\.final_layernorm\.", "model.norm."),
    )
)


@family("FalconH1ForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Linear layers have no biases, so that weights take the multipliers."""
    for key in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        config.require(key, False, False)
    config.require("hidden_act", "silu", "silu")
    size = config.optional_integer("mamba_d_ssm")
    if size is None:
        size = config.count("mamba_expand", 2) * config.count("hidden_size")
    heads, groups = config.count("mamba_n_heads", 128), config.count("mamba_n_groups", 1)
    config.require_multiple("mamba_d_ssm", size, "mamba_n_heads", heads)
    config.require_multiple("mamba_n_heads", heads, "mamba_n_groups", groups)
    key_dim = config.count("mamba_d_state", 256)
    norms = config.flag("mamba_rms_norm", False)
    layers = tuple(range(config.count("num_hidden_layers")))
    state = mamba2_of(
        layers,
        num_heads=heads,
        num_groups=groups,
        key_dim=key_dim,
        value_dim=size // heads,
        taps=config.count("mamba_d_conv", 4),
        convolution_bias=config.flag("mamba_conv_bias", True),
        norm_size=size // groups if norms else 0,
        norm_eps=norm_eps(config, 1e-5),
        step_limits=step_limits(config),
        gate_first=not config.flag("mamba_norm_before_gate", True),
    )
    return decoder_spec(
        config,
        default_eps=1e-5,
        ropes=(config.rope(head_size(config)),),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=config.number("lm_head_multiplier", 1.0),
        state=state,
        factors=_factors(config, size, groups * key_dim, heads),
        names=_NAMES,
    )


def _factors(config: ConfigReader, values: int, keys: int, heads: int) -> tuple[WeightFactors, ...]:
    entering = config.number("attention_in_multiplier", 1.0)
    ssm = config.number("ssm_in_multiplier", 1.0)
    inner = _multipliers(config, "ssm_multipliers", 5)
    gate, down = _multipliers(config, "mlp_multipliers", 2)
    sizes = (values, values, keys, keys, heads)
    whole = {
        "self_attn.q_proj": entering,
        "self_attn.k_proj": entering * config.number("key_multiplier", 1.0),
        "self_attn.v_proj": entering,
        "self_attn.o_proj": config.number("attention_out_multiplier", 1.0),
        "state.out_proj": config.number("ssm_out_multiplier", 1.0),
        "mlp.gate_proj": gate,
        "mlp.down_proj": down,
    }
    parts = tuple((size, ssm * factor) for size, factor in zip(sizes, inner, strict=True))
    return (
        *(WeightFactors(name=name, parts=((0, factor),)) for name, factor in whole.items() if factor != 1.0),
        WeightFactors(name="state.in_proj", parts=parts),
    )


def _multipliers(config: ConfigReader, key: str, count: int) -> list[float]:
    values = config.values.get(key)
    if values is None:
        return [1.0] * count
    if not isinstance(values, list) or len(values) != count or {type(each) for each in values} - {int, float}:
        raise CheckpointError(f"{config.source}: {key} = {values!r} is not a list of {count} numbers")
    return [float(each) for each in values]
