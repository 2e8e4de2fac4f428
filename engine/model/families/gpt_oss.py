"""gpt-oss: attention sinks, alternating windows, biases, clamped gates, experts stored together."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import attention_biases, decoder_spec, family, windows_of
from engine.model.spec import ExpertSpec, ModelSpec

# Of checkpoints that state none.
_ROTATION = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@family("GptOssForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Experts lie in a floating-point type or in MXFP4."""
    config = config.turned(_ROTATION)
    num_layers = config.count("num_hidden_layers")
    config.require("swiglu_alpha", 1.702, 1.702)
    config.require("swiglu_limit", 7.0, 7.0)
    windows = windows_of(
        config,
        default=[layer % 2 == 0 for layer in range(num_layers)],
        window=config.integer("sliding_window", 128),
    )
    experts = ExpertSpec(
        num_experts=config.integer_of("num_local_experts", "num_experts"),
        num_active=config.count("num_experts_per_tok", 4),
        intermediate_size=config.integer("intermediate_size"),
        layers=tuple(range(num_layers)),
        scoring="softmax_of_best",
        layout="biased" if config.text("experts_layout", "gpt_oss") == "biased" else "gpt_oss",
    )
    head_dim = config.count("head_dim", 64)
    return decoder_spec(
        config,
        default_eps=1e-5,
        head_dim=head_dim,
        ropes=(config.rope(head_dim, default_theta=150_000.0),),
        windows=windows,
        **attention_biases(config, default=True),
        attention_sinks=True,
        activation="clamped_swiglu",
        experts=experts,
    )
