"""Nemotron 3 and 4, Minitron: layer norms with weights stored as offsets, squared ReLU without gate."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import (
    activation,
    attention_biases,
    decoder_spec,
    family,
    head_size,
    layer_norms,
)
from engine.model.spec import ModelSpec


@family("NemotronForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Half of a head is rotated unless stated."""
    return decoder_spec(
        config,
        **attention_biases(config),
        **layer_norms(config, "norm_eps"),
        norm_offset=True,
        ropes=(config.rope(head_size(config), default_partial=0.5),),
        activation=activation(config, default="relu2"),
        gated=False,
        mlp_bias=config.flag("mlp_bias", False),
    )
