"""OLMo 2: norms after the half layers, queries and keys normed over all heads together."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import attention_biases, decoder_spec, family
from engine.model.spec import ModelSpec


@family("Olmo2ForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """OLMo 2."""
    return decoder_spec(
        config,
        default_eps=1e-5,
        **attention_biases(config),
        qk_norm="full",
        norm_placement="post",
    )
