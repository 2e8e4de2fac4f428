"""Jais 2: Llama with layer norms and biases, whose feed-forward has no gate and squares what is positive."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import activation, attention_biases, decoder_spec, family, layer_norms
from engine.model.spec import ModelSpec


@family("Jais2ForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Jais-2-8B and 70B."""
    return decoder_spec(
        config,
        **attention_biases(config, default=True),
        **layer_norms(config),
        activation=activation(config, default="relu2"),
        gated=False,
        mlp_bias=config.flag("mlp_bias", True),
    )
