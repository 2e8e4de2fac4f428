"""StarCoder 2: layer norms, biases everywhere, a feed-forward without gate."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import activation, decoder_spec, family, layer_norms
from engine.model.spec import ModelSpec, TensorNames

_NAMES = TensorNames(renamed=((r"\.mlp\.c_fc\.", ".mlp.up_proj."), (r"\.mlp\.c_proj\.", ".mlp.down_proj.")))


@family("Starcoder2ForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """All sizes."""
    config = config.completed(num_key_value_heads=2)
    config.require("norm_type", "layer_norm", "layer_norm")
    config.require("mlp_type", "default", "default")
    bias = config.flag("use_bias", True)
    return decoder_spec(
        config,
        **layer_norms(config, "norm_epsilon"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        activation=activation(config, default="gelu_pytorch_tanh"),
        gated=False,
        windows=(config.optional_integer("sliding_window"),) * config.count("num_hidden_layers"),
        tied_embeddings=config.flag("tie_word_embeddings", True),
        names=_NAMES,
    )
