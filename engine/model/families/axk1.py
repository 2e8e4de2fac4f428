"""A.X K1: DeepSeek-V3 with a norm behind experts."""

from __future__ import annotations

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.base import family, sparse_of
from engine.model.families.deepseek import corrected_routing, read_latent, routed_experts
from engine.model.spec import CheckpointError, ModelSpec, TensorNames


@family("AXK1ForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Published checkpoints correct no choice of experts, and have the norm in layers that do not use it."""
    config = ConfigReader({"q_lora_rank": 1536, **config.values}, config.source)
    if not config.optional_integer("q_lora_rank"):
        raise CheckpointError(f"{config.source}: q_lora_rank is missing: queries are projected twice")
    num_layers = config.count("num_hidden_layers")
    first, every = config.integer("first_k_dense_replace", 1), config.count("moe_layer_freq", 1)
    sparse = sparse_of(config, [layer for layer in range(first, num_layers) if layer % every == 0])
    routing = corrected_routing(config, num_groups=8, num_active_groups=4)
    experts = msgspec.structs.replace(
        routed_experts(config, routing, default_scaling=2.5, default_shared=1),
        layers=sparse,
        may_lack_correction=True,
        output_norm=True,
    )
    spec = read_latent(config, experts, interleaved=config.flag("rope_interleave", True))
    dense = "|".join(str(layer) for layer in range(num_layers) if layer not in sparse)
    unused = rf"model\.layers\.({dense})\.(mlp\.)?post_mlp_layernorm\." if dense else ""
    names = TensorNames(
        renamed=((r"\.(mlp\.)?post_mlp_layernorm\.", ".post_feedforward_layernorm."),),
        skipped="|".join(filter(None, (spec.names.skipped, unused))),
    )
    return msgspec.structs.replace(spec, names=names)
