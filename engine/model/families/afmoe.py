"""AFMoE (Arcee's Trinity): norms before and after the half layers, a gate behind attention, rotation where
there is a window, and experts beside a shared one.
"""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec, family, some_rotate, windows_of
from engine.model.spec import ExpertSpec, ModelSpec, TensorNames

_NAMES = TensorNames(
    renamed=(
        (r"\.pre_mlp_layernorm\.", ".pre_feedforward_layernorm."),
        (r"\.post_mlp_layernorm\.", ".post_feedforward_layernorm."),
        (r"\.mlp\.router\.gate\.", ".mlp.gate."),
        (r"\.mlp\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
    )
)


@family("AfmoeForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Every fourth layer looks at everything unless stated."""
    config.require("attention_bias", False, False)
    config.require("score_func", "sigmoid", "sigmoid")
    config.require("route_norm", True, True)
    num_layers, head_dim = config.count("num_hidden_layers"), config.count("head_dim", 128)
    every = config.count("global_attn_every_n_layers", 4)
    windows = windows_of(
        config,
        default=[(layer + 1) % every != 0 for layer in range(num_layers)],
        window=config.integer("sliding_window", 1024),
    )
    size = config.count("moe_intermediate_size")
    experts = ExpertSpec(
        num_experts=config.integer_of("num_experts", "num_local_experts"),
        num_active=config.count("num_experts_per_tok", 6),
        intermediate_size=size,
        layers=tuple(range(config.integer("num_dense_layers", 1), num_layers)),
        scoring="sigmoid",
        correction_bias=True,
        scaling=config.number("route_scale", 1.0),
        shared_intermediate_size=size * config.integer("num_shared_experts", 2),
    )
    return decoder_spec(
        config,
        default_eps=1e-5,
        head_dim=head_dim,
        **some_rotate(config.rope(head_dim), [window is not None for window in windows]),
        windows=windows,
        qk_norm="head",
        attention_gate="apart",
        norm_placement="sandwich",
        embedding_scale=config.count("hidden_size") ** 0.5 if config.flag("mup_enabled", False) else 1.0,
        experts=experts if experts.layers else None,
        names=_NAMES,
    )
