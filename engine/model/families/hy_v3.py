"""Hunyuan 3: Qwen3's attention, and experts beside a shared one, chosen by corrected sigmoids."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import attention_biases, decoder_spec, family, sparse_of
from engine.model.spec import ExpertSpec, ModelSpec, TensorNames

_NAMES = (
    (r"\.mlp\.router\.gate\.", ".mlp.gate."),
    (r"\.mlp\.(expert_bias|e_score_correction_bias)$", ".mlp.gate.e_score_correction_bias"),
    (r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."),
)


@family("HYV3ForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Experts in all layers but the first unless stated."""
    num_layers, size = config.count("num_hidden_layers"), config.count("moe_intermediate_size", 1536)
    experts = ExpertSpec(
        num_experts=config.integer_of("num_experts", "num_local_experts"),
        num_active=config.count("num_experts_per_tok", 8),
        intermediate_size=size,
        layers=sparse_of(config, range(1, num_layers)),
        scoring="sigmoid",
        correction_bias=True,
        scaling=config.number("router_scaling_factor", 2.826),
        shared_intermediate_size=size * config.integer("num_shared_experts", 1),
    )
    head_dim = config.count("head_dim", 128)
    return decoder_spec(
        config,
        default_eps=1e-5,
        **attention_biases(config),
        head_dim=head_dim,
        ropes=(config.rope(head_dim, default_theta=11_158_840.0),),
        qk_norm="head",
        mlp_bias=config.flag("mlp_bias", False),
        experts=experts if experts.layers else None,
        # A layer behind the last one, which drafts.
        names=TensorNames(renamed=_NAMES, skipped=rf"model\.layers\.{num_layers}\."),
    )
