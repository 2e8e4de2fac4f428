"""MiniMax M2: norms of queries and keys over all heads, sigmoid scores with a correction."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec, family
from engine.model.spec import CheckpointError, ExpertSpec, ModelSpec, TensorNames

_NAMES = TensorNames(
    renamed=(
        (r"\.block_sparse_moe\.e_score_correction_bias$", ".block_sparse_moe.gate.e_score_correction_bias"),
    ),
    # Layers that predict several tokens.
    skipped=r"model\.mtp_",
)


@family("MiniMaxM2ForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """`rotary_dim` of a head's dimensions are rotated, in older configurations."""
    config.require("use_qk_norm", True, True)
    kinds = config.numbers("attn_type_list", config.count("num_hidden_layers"))
    if kinds is not None and set(kinds) != {1}:
        raise CheckpointError(f"{config.source}: attn_type_list has linear attention, which is not supported")
    config.require("qk_norm_type", "per_layer", "per_layer")
    config.require("scoring_func", "sigmoid", "sigmoid")
    config.require("shared_intermediate_size", 0, 0)
    head_dim = config.count("head_dim", 128)
    partial = config.integer("rotary_dim", head_dim) / head_dim
    experts = ExpertSpec(
        num_experts=config.integer_of("num_local_experts", "num_experts"),
        num_active=config.count("num_experts_per_tok", 8),
        intermediate_size=config.count("intermediate_size"),
        layers=tuple(range(config.count("num_hidden_layers"))),
        scoring="sigmoid",
        correction_bias=True,
        layout="mixtral",
    )
    return decoder_spec(
        config,
        head_dim=head_dim,
        ropes=(config.rope(head_dim, default_theta=5_000_000.0, default_partial=partial),),
        qk_norm="full",
        experts=experts,
        names=_NAMES,
    )
