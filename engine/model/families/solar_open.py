"""Solar Open: Llama's attention, and DeepSeek-V3's experts in every layer."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec, family, head_size
from engine.model.families.deepseek import corrected_routing, routed_experts
from engine.model.spec import ModelSpec


@family("SolarOpenForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Solar-Open-100B."""
    routing = corrected_routing(config, num_groups=1, num_active_groups=1)
    return decoder_spec(
        config,
        default_eps=1e-5,
        head_dim=head_size(config, 128),
        intermediate_size=config.integer("intermediate_size", config.count("moe_intermediate_size")),
        ropes=(config.rope(head_size(config, 128), default_theta=1_000_000.0, default_partial=1.0),),
        qkv_bias=config.flag("attention_bias", False),
        # No layer is dense, whatever else is said.
        experts=routed_experts(config.without("first_k_dense_replace"), routing, default_shared=1),
    )
