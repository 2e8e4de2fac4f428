"""Laguna (Poolside): windows and rotations by kind of layer, numbers of heads by layer, a softplus gate
behind attention, and experts beside a shared one.
"""

from __future__ import annotations

from typing import Literal

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec, family, ropes_by_kind, sparse_of, windows_of
from engine.model.layer_spec import LayerHeads
from engine.model.spec import CheckpointError, ExpertSpec, ModelSpec, TensorNames

_NAMES = TensorNames(
    renamed=(
        (r"\.self_attn\.g_proj\.", ".self_attn.gate_proj."),
        (r"\.mlp\.experts\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),
        (r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),
    )
)


@family("LagunaForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """All layers look at everything, and all but the first have experts, unless stated."""
    config.require("attention_bias", False, False)
    config.require("moe_apply_router_weight_on_input", False, False)
    config.require("moe_router_logit_softcapping", 0.0, 0.0)
    num_layers, head_dim = config.count("num_hidden_layers"), config.count("head_dim", 128)
    windows = windows_of(config, default=[False] * num_layers, window=config.integer("sliding_window", 512))
    heads = _heads(config, num_layers, head_dim)
    experts = ExpertSpec(
        num_experts=config.integer_of("num_experts", "num_local_experts"),
        num_active=config.count("num_experts_per_tok", 8),
        intermediate_size=config.count("moe_intermediate_size", 512),
        layers=sparse_of(config, range(1, num_layers)),
        scoring="sigmoid",
        correction_bias=True,
        scaling=config.number("moe_routed_scaling_factor", 1.0),
        shared_intermediate_size=config.count("shared_expert_intermediate_size", 512),
    )
    # Half of a head turns in layers that look at everything where nothing is said of any rotation.
    share = 1.0 if config.values.get("rope_parameters") else 0.5
    return decoder_spec(
        _most(config, heads) if heads else config,
        head_dim=head_dim,
        layer_heads=heads,
        **ropes_by_kind(config, head_dim, windows, thetas=(500_000.0, 10_000.0), partials=(share, 1.0)),
        windows=windows,
        qk_norm="head",
        attention_gate=_gate(config),
        attention_gate_kind="softplus",
        experts=experts if experts.layers else None,
        names=_NAMES,
    )


def _gate(config: ConfigReader) -> Literal["apart", "one_per_head"]:
    gating = config.values.get("gating", True)
    if gating in (True, None, "per-head"):
        return "one_per_head"
    if gating != "per-element":
        raise CheckpointError(
            f"{config.source}: gating = {gating!r} is not supported, only per-head and per-element"
        )
    return "apart"


def _heads(config: ConfigReader, num_layers: int, head_dim: int) -> tuple[LayerHeads, ...]:
    """Empty where all layers have the same number."""
    counts = config.numbers("num_attention_heads_per_layer", num_layers)
    if counts is None or set(counts) == {config.count("num_attention_heads")}:
        return ()
    kv_heads = config.count("num_key_value_heads", 8)
    for count in counts:
        config.require_multiple("num_attention_heads_per_layer", count, "num_key_value_heads", kv_heads)
    return tuple(
        LayerHeads(num_kv_heads=kv_heads, head_dim=head_dim, value_dim=head_dim, num_heads=count)
        for count in counts
    )


def _most(config: ConfigReader, heads: tuple[LayerHeads, ...]) -> ConfigReader:
    most = max(each.num_heads for each in heads)
    return ConfigReader({**config.values, "num_attention_heads": most}, config.source)
