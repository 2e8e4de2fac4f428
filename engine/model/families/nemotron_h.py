"""Nemotron-H: each layer is one half, Mamba 2, attention without rotation, or a feed-forward without gate,
which may be sparse.
"""

from __future__ import annotations

from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.families.bamba import mamba2_of
from engine.model.families.base import activation, decoder_spec, family, some_rotate
from engine.model.spec import CheckpointError, ExpertSpec, ModelSpec, StateSpec, TensorNames

# Letters of `hybrid_override_pattern`, and names of newer and older configurations.
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS = {"linear_attention": "mamba", "full_attention": "attention"} | {
    kind: kind for kind in _LETTERS.values()
}
_OLDER = {
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "time_step_min": "mamba_dt_min",
    "use_conv_bias": "mamba_conv_bias",
}


@family("NemotronHForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Dense, or with experts without gates beside a shared one."""
    config = config.aliased(**_OLDER)
    kinds = _kinds(config)
    config = ConfigReader({**config.values, "num_hidden_layers": len(kinds)}, config.source)
    attending, others, dense, sparse = (
        tuple(layer for layer, each in enumerate(kinds) if each == kind)
        for kind in ("attention", "mamba", "mlp", "moe")
    )
    feeding = tuple(sorted((*dense, *sparse)))
    head_dim, eps = config.count("head_dim", 128), config.number("layer_norm_epsilon", 1e-5)
    return decoder_spec(
        config,
        norm_eps=eps,
        head_dim=head_dim,
        num_kv_heads=config.count("num_key_value_heads", 8),
        **some_rotate(config.turning_whole().rope(head_dim), [False] * len(kinds)),
        activation=activation(config, "mlp_hidden_act", "relu2"),
        gated=False,
        mlp_bias=config.flag("mlp_bias", False),
        state=_state(config, others, eps) if others else None,
        attention_layers=attending,
        feed_forward_layers=feeding,
        experts=_experts(config, sparse) if sparse else None,
        names=_names(attending, others, feeding),
    )


def _state(config: ConfigReader, layers: tuple[int, ...], eps: float) -> StateSpec:
    """Time steps have a lower limit alone."""
    config.require("mamba_hidden_act", "silu", "silu")
    heads, groups = config.count("mamba_num_heads", 128), config.count("n_groups", 8)
    config.require_multiple("mamba_num_heads", heads, "n_groups", groups)
    value_dim = config.count("mamba_head_dim", 64)
    return mamba2_of(
        layers,
        num_heads=heads,
        num_groups=groups,
        key_dim=config.count("ssm_state_size", 128),
        value_dim=value_dim,
        taps=config.count("conv_kernel", 4),
        convolution_bias=config.flag("use_conv_bias", True),
        bias=config.flag("use_bias", False),
        norm_size=heads * value_dim // groups,
        norm_eps=eps,
        step_limits=(config.number("time_step_min", 0.001), float("inf")),
    )


def _kinds(config: ConfigReader) -> list[str]:
    """What each layer is."""
    keys = ("layer_types", "layers_block_type", "hybrid_override_pattern")
    key = next((key for key in keys if config.values.get(key)), None)
    if key is None:
        raise CheckpointError(f"{config.source}: layers_block_type is missing")
    listed: Any = config.values[key]
    names = _LETTERS if key == keys[2] else _KINDS
    if not isinstance(listed, str if key == keys[2] else list):
        raise CheckpointError(f"{config.source}: {key} = {listed!r} does not list layers")
    unknown = sorted({str(each) for each in listed} - set(names))
    if unknown:
        raise CheckpointError(f"{config.source}: {key} holds {unknown}, which is not supported")
    return [names[each] for each in listed]


def _experts(config: ConfigReader, layers: tuple[int, ...]) -> ExpertSpec:
    """As DeepSeek-V3 chooses them; they may take and give a projection of the stream."""
    latent = config.optional_integer("moe_latent_size")
    return ExpertSpec(
        num_experts=config.count("n_routed_experts", 8),
        num_active=config.count("num_experts_per_tok", 2),
        intermediate_size=config.count("moe_intermediate_size"),
        layers=layers,
        scoring="sigmoid",
        normalized=config.flag("norm_topk_prob", True),
        scaling=config.number("routed_scaling_factor", 1.0),
        num_groups=config.count("n_group", 1),
        num_active_groups=config.count("topk_group", 1),
        group_score="two_best",
        correction_bias=True,
        shared_intermediate_size=config.count("moe_shared_expert_intermediate_size"),
        latent_size=0 if latent is None else config.count("moe_latent_size"),
    )


def _names(attending: tuple[int, ...], others: tuple[int, ...], feeding: tuple[int, ...]) -> TensorNames:
    """One mixer and one norm in each layer, whatever it is."""
    renamed = [
        (r"^backbone\.", "model."),
        (r"^model\.embeddings\.", "model.embed_tokens."),
        (r"^model\.norm_f\.", "model.norm."),
    ]
    parts = (
        (attending, "self_attn", "input_layernorm"),
        (others, "state", "input_layernorm"),
        (feeding, "mlp", "post_attention_layernorm"),
    )
    for layers, mixer, norm in parts:
        if layers:
            which = rf"^model\.layers\.({'|'.join(map(str, layers))})"
            renamed += [
                (rf"{which}\.mixer\.", rf"model.layers.\1.{mixer}."),
                (rf"{which}\.norm\.", rf"model.layers.\1.{norm}."),
            ]
    return TensorNames(renamed=tuple(renamed), skipped=r"mtp\.")
