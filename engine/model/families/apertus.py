"""Apertus: a feed-forward without gate whose activation, xIELU, learns; norms of queries and keys."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import activation, attention_biases, decoder_spec, family, head_size
from engine.model.spec import ModelSpec, TensorNames

_NAMES = TensorNames(
    renamed=(
        (r"\.attention_layernorm\.", ".input_layernorm."),
        (r"\.feedforward_layernorm\.", ".post_attention_layernorm."),
    )
)

# Of checkpoints that state none.
_ROTATION = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@family("ApertusForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Both sizes."""
    config = config.turned(_ROTATION)
    config.require("post_norm", False, False)
    config.require("mlp_bias", False, False)
    config.require("qk_norm", True, True)
    return decoder_spec(
        config,
        default_eps=1e-5,
        **attention_biases(config),
        ropes=(config.rope(head_size(config), default_theta=12_000_000.0),),
        activation=activation(config, default="xielu"),
        gated=False,
        qk_norm="head",
        names=_NAMES,
    )
