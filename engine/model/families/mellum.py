"""Mellum 2: Qwen3's layers with experts; those that look at everything and those with a window have rotations
of their own.
"""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import (
    attention_biases,
    decoder_spec,
    family,
    ropes_by_kind,
    sparse_of,
    windows_of,
)
from engine.model.spec import ExpertSpec, ModelSpec, TensorNames


@family("MellumForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """All layers look at everything and have experts unless stated."""
    num_layers, head_dim = config.count("num_hidden_layers"), config.count("head_dim", 128)
    windows = windows_of(
        config, default=[False] * num_layers, window=config.optional_integer("sliding_window")
    )
    experts = ExpertSpec(
        num_experts=config.integer_of("num_experts", "num_local_experts"),
        num_active=config.count("num_experts_per_tok", 8),
        intermediate_size=config.count("moe_intermediate_size"),
        layers=sparse_of(config, range(num_layers)),
        normalized=config.flag("norm_topk_prob", True),
    )
    return decoder_spec(
        config,
        head_dim=head_dim,
        **attention_biases(config),
        **ropes_by_kind(config, head_dim, windows, thetas=(500_000.0, 10_000.0), partials=(1.0, 1.0)),
        qk_norm="head",
        windows=windows,
        experts=experts if experts.layers else None,
        # A layer that drafts.
        names=TensorNames(skipped=r"mtp\."),
    )
