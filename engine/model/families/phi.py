"""Phi 1, 1.5 and 2: both half layers side by side under one norm, biases everywhere, the head included."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import activation, decoder_spec, family, head_size, layer_norms
from engine.model.spec import ModelSpec, TensorNames

_NAMES = TensorNames(
    renamed=(
        (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
        (r"\.mlp\.fc1\.", ".mlp.up_proj."),
        (r"\.mlp\.fc2\.", ".mlp.down_proj."),
        (r"^model\.final_layernorm\.", "model.norm."),
    )
)


@family("PhiForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Half of a head is rotated unless stated."""
    config.require("qk_layernorm", False, False)
    return decoder_spec(
        config,
        **layer_norms(config),
        ropes=(config.rope(head_size(config), default_partial=0.5),),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
        activation=activation(config, default="gelu_new"),
        gated=False,
        norm_placement="parallel_shared",
        names=_NAMES,
    )
