"""Arcee: Llama whose feed-forward has no gate and squares what is positive."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import activation, attention_biases, decoder_spec, family
from engine.model.spec import ModelSpec


@family("ArceeForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """AFM-4.5B and its kin."""
    return decoder_spec(
        config,
        default_eps=1e-5,
        **attention_biases(config),
        activation=activation(config, default="relu2"),
        gated=False,
        mlp_bias=config.flag("mlp_bias", False),
    )
