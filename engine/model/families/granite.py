"""Granite 3, and 4 with Mamba 2 in some layers: multipliers of embeddings, scores, half layers and logits;
experts in one tensor, perhaps beside a shared feed-forward.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.bamba import mamba2
from engine.model.families.base import (
    attention_biases,
    decoder_spec,
    family,
    head_size,
    mixed_layers,
    some_rotate,
)
from engine.model.spec import CheckpointError, ExpertSpec, ModelSpec, TensorNames

_EXPERTS = TensorNames(
    renamed=(
        (r"\.block_sparse_moe\.input_linear\.weight$", ".mlp.experts.gate_up_proj"),
        (r"\.block_sparse_moe\.output_linear\.weight$", ".mlp.experts.down_proj"),
        (r"\.block_sparse_moe\.router\.layer\.", ".mlp.gate."),
        (r"\.shared_mlp\.input_linear\.", ".mlp.shared_experts.gate_up_proj."),
        (r"\.shared_mlp\.output_linear\.", ".mlp.shared_experts.down_proj."),
    )
)


@family("GraniteForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Without experts."""
    return _scaled(config, mlp_bias=config.flag("mlp_bias", False))


@family("GraniteMoeForCausalLM")
@family("GraniteMoeSharedForCausalLM")
def read_experts(config: ConfigReader, **positions: Any) -> ModelSpec:
    """With experts in every layer."""
    experts = ExpertSpec(
        num_experts=config.count("num_local_experts", 8),
        num_active=config.count("num_experts_per_tok", 2),
        intermediate_size=config.count("intermediate_size"),
        layers=tuple(range(config.count("num_hidden_layers"))),
        scoring="softmax_of_best",
        shared_intermediate_size=config.integer("shared_intermediate_size", 0),
        layout="stacked",
    )
    return _scaled(config, fused_gate_up=True, experts=experts, names=_EXPERTS, **positions)


_DENSE = TensorNames(
    renamed=(
        (r"\.shared_mlp\.input_linear\.", ".mlp.gate_up_proj."),
        (r"\.shared_mlp\.output_linear\.", ".mlp.down_proj."),
    )
)


@family("GraniteMoeHybridForCausalLM")
def read_hybrid(config: ConfigReader) -> ModelSpec:
    """Granite 4; without experts the shared feed-forward is the only one."""
    num_layers = config.count("num_hidden_layers")
    attending, others = mixed_layers(
        config,
        default=["mamba"] * num_layers,
        state="mamba",
        keys=("layer_types", "layers_block_type"),
    )
    if not attending:
        raise CheckpointError(f"{config.source}: layer_types: no layer attends, which is not supported")
    rope = config.rope(head_size(config))
    rotates = [config.values.get("position_embedding_type") == "rope"] * num_layers
    fields = some_rotate(rope, rotates) | {
        "state": mamba2(config, others),
        "attention_layers": attending,
    }
    if config.integer("num_local_experts", 8):
        spec = read_experts(config, **fields)
    else:
        size = config.count("shared_intermediate_size")
        spec = _scaled(config, intermediate_size=size, fused_gate_up=True, names=_DENSE, **fields)
    names = TensorNames(renamed=(*spec.names.renamed, (r"\.mamba\.", ".state.")))
    return msgspec.structs.replace(spec, names=names)


def _scaled(config: ConfigReader, **fields: Any) -> ModelSpec:
    # Half layers begin with norms, to which the size of the stream is nothing but their eps: a stream that is
    # smaller by the multiplier adds what half layers give as it is.
    multiplier = config.number("residual_multiplier", 1.0)
    scaling = config.number("logits_scaling", 1.0)
    if not multiplier or not scaling:
        raise CheckpointError(f"{config.source}: residual_multiplier and logits_scaling cannot be 0")
    spec = decoder_spec(
        config,
        **attention_biases(config),
        attention_scale=config.number("attention_multiplier", 1.0),
        embedding_scale=config.number("embedding_multiplier", 1.0) / multiplier,
        logit_scale=1.0 / scaling,
        **fields,
    )
    return msgspec.structs.replace(spec, norm_eps=spec.norm_eps / multiplier**2)
