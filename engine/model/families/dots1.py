"""dots.llm1: Qwen3's attention, DeepSeek-V3's experts."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import attention_biases, decoder_spec, family
from engine.model.families.deepseek import corrected_routing, routed_experts
from engine.model.families.qwen2 import upper_windows
from engine.model.spec import ModelSpec


@family("Dots1ForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Experts in every layer from `first_k_dense_replace` upwards."""
    config.require("moe_layer_freq", 1, 1)
    routing = corrected_routing(config, num_groups=1, num_active_groups=1, normalized=False)
    return decoder_spec(
        config,
        **attention_biases(config),
        qk_norm="head",
        windows=upper_windows(config),
        experts=routed_experts(config, routing),
    )
