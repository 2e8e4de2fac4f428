"""Code World Model: Llama 3 of which three in four layers slide."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec, family, head_size, windows_of
from engine.model.spec import ModelSpec

_SCALING = {
    "rope_type": "llama3",
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


@family("CwmForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Every fourth layer, from the first on, looks at everything."""
    if not (config.values.get("rope_parameters") or config.values.get("rope_scaling")):
        config = ConfigReader({**config.values, "rope_scaling": _SCALING}, config.source)
    return decoder_spec(
        config,
        default_eps=1e-5,
        ropes=(config.rope(head_size(config, 128), default_theta=1_000_000.0),),
        head_dim=head_size(config, 128),
        windows=windows_of(
            config,
            default=[layer % 4 != 0 for layer in range(config.count("num_hidden_layers"))],
            window=config.integer("sliding_window", 8192),
        ),
        mlp_bias=config.flag("mlp_bias", False),
    )
