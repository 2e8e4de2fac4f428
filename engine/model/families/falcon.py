"""Falcon: both half layers side by side, under one norm or two; one head of keys and values, or some."""

from __future__ import annotations

from typing import Literal

from engine.model.config_reader import ConfigReader
from engine.model.families.base import activation, decoder_spec, family, layer_norms
from engine.model.spec import ModelSpec, TensorNames

_NAMES = TensorNames(
    renamed=(
        (r"^transformer\.word_embeddings\.", "model.embed_tokens."),
        (r"^transformer\.ln_f\.", "model.norm."),
        (r"^transformer\.h\.", "model.layers."),
        (r"\.ln_attn\.", ".input_layernorm."),
        (r"\.ln_mlp\.", ".post_attention_layernorm."),
        (r"\.self_attention\.query_key_value\.", ".self_attn.qkv_proj."),
        (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
        (r"\.mlp\.dense_h_to_4h\.", ".mlp.up_proj."),
        (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
    )
)


@family("FalconForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Those whose scores fall with distance (ALiBi) are not served."""
    config.require("alibi", False, False)
    num_heads, bias = config.count("num_attention_heads"), config.flag("bias", False)
    is_new, is_parallel = config.flag("new_decoder_architecture", False), config.flag("parallel_attn", True)
    if is_new:
        config.require("parallel_attn", True, True)
    is_shared = not is_new and config.flag("multi_query", True)
    norms: Literal["pre", "parallel", "parallel_shared"] = "parallel_shared" if is_parallel else "pre"
    if is_new and config.integer("num_ln_in_parallel_attn", 2) == 2:
        norms = "parallel"
    num_kv_heads = 1 if is_shared else config.count("num_kv_heads", num_heads) if is_new else num_heads
    return decoder_spec(
        config,
        **layer_norms(config, "layer_norm_epsilon"),
        intermediate_size=config.count("ffn_hidden_size", 4 * config.count("hidden_size")),
        num_kv_heads=num_kv_heads,
        head_dim=config.count("hidden_size") // num_heads,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        activation=activation(config, "activation", "gelu"),
        gated=False,
        fused_qkv="by_head",
        norm_placement=norms,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        names=_NAMES,
    )
