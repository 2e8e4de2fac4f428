"""Kimi Linear: the delta rule with a decay for each channel in most layers, latent attention that nothing
turns in the others, and DeepSeek-V3's experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.base import family, mixed_layers, norm_eps, standing
from engine.model.families.deepseek import corrected_routing, listed_sparse, read_latent, routed_experts
from engine.model.spec import CheckpointError, ModelSpec, StateSpec, TensorNames

# What DeepSeek-V3 calls otherwise.
OWN_KEYS = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
_EXPERT_NAMES = (
    (r"\.block_sparse_moe\.", ".mlp."),
    *(
        (rf"(\.experts\.\d+)\.{own}\.", rf"\1.{name}_proj.")
        for own, name in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    ),
)
# Of layers with a state; two products make gates, and decays.
_STATE_NAMES = (
    (r"\.state\.o_proj\.", ".state.out_proj."),
    (r"\.state\.o_norm\.", ".state.norm."),
    (r"\.state\.f_a_proj\.", ".state.a_proj."),
    (r"\.state\.f_b_proj\.", ".state.a_up_proj."),
    (r"\.state\.g_a_proj\.", ".state.g_proj."),
    (r"\.state\.g_b_proj\.", ".state.g_up_proj."),
    # Where one product makes decays.
    (r"\.state\.f_proj\.", ".state.a_proj."),
)


@family("KimiLinearForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Kimi-Linear-48B-A3B."""
    config = config.aliased(**OWN_KEYS)
    for key, expected in (
        ("mla_use_nope", True),
        ("moe_router_activation_func", "sigmoid"),
        ("moe_layer_freq", 1),
    ):
        config.require(key, expected, expected)
    own = _table(config)
    attending, others = _layers(config, own)
    head_dim = own.count("head_dim", config.count("linear_head_dim", 128))
    routing = corrected_routing(config, num_groups=1, num_active_groups=1)
    experts = routed_experts(config, routing, default_dense=1, default_scaling=2.446, default_shared=1)
    spec = read_latent(
        config,
        listed_sparse(config, experts),
        interleaved=False,
        default_eps=1e-5,
        attention_layers=attending,
        state=channel_delta(
            config,
            others,
            num_heads=own.count("num_heads", config.count("linear_num_heads", 32)),
            head_dim=head_dim,
            taps=own.count("short_conv_kernel_size", config.count("linear_conv_kernel_dim", 4)),
            low_rank=head_dim,
            norm_eps=norm_eps(config, 1e-5),
        ),
        names=state_names(others, *_EXPERT_NAMES),
    )
    # Scores know nothing of a rotation's stretch either.
    scale = spec.head_dim**-0.5
    return msgspec.structs.replace(spec, attention_scale=scale, ropes=tuple(map(standing, spec.ropes)))


def channel_delta(
    config: ConfigReader, layers: tuple[int, ...], *, num_heads: int, head_dim: int, **fields: Any
) -> StateSpec | None:
    """Kimi Delta Attention in these layers."""
    config.require("hidden_act", "silu", "silu")
    if not layers:
        return None
    return StateSpec(
        kind="delta",
        layers=layers,
        channels=3 * num_heads * head_dim,
        num_heads=num_heads,
        num_groups=num_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        layout="apart",
        channel_decays=True,
        norm_size=head_dim,
        gate_kind="sigmoid",
        **fields,
    )


def state_names(layers: tuple[int, ...], *renamed: tuple[str, str], skipped: str = "") -> TensorNames:
    """Names of a model whose layers of both kinds call their first half `self_attn`, once `renamed`."""
    which = (rf"^model\.layers\.({'|'.join(map(str, layers))})\.self_attn\.", r"model.layers.\1.state.")
    return TensorNames(renamed=(*renamed, *((which, *_STATE_NAMES) if layers else ())), skipped=skipped)


def _table(config: ConfigReader) -> ConfigReader:
    """`linear_attn_config` of published checkpoints."""
    given = config.values.get("linear_attn_config") or {}
    if not isinstance(given, Mapping):
        raise CheckpointError(f"{config.source}: linear_attn_config = {given!r} is not a table of keys")
    return ConfigReader(given, f"{config.source}: linear_attn_config")


def _layers(config: ConfigReader, own: ConfigReader) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Layers that attend, and the others; `own`, the `linear_attn_config`, counts them from one."""
    num_layers = config.count("num_hidden_layers")
    attending = own.numbers_of("full_attn_layers")
    if attending is None:
        attending = tuple(range(5, num_layers + 1, 4))
    elif sorted([*attending, *(own.numbers_of("kda_layers") or ())]) != list(range(1, num_layers + 1)):
        raise CheckpointError(
            f"{own.source}: full_attn_layers and kda_layers do not name {num_layers} layers"
        )
    default = [
        "full_attention" if layer + 1 in attending else "linear_attention" for layer in range(num_layers)
    ]
    return mixed_layers(config, default=default, state="linear_attention")
