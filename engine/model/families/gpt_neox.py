"""GPT-NeoX, Pythia: both half layers side by side with norms of their own, q, k and v stored head by head."""

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
from engine.model.spec import ModelSpec, TensorNames

_NAMES = TensorNames(
    renamed=(
        (r"^embed_out\.", "lm_head."),
        (r"^gpt_neox\.embed_in\.", "model.embed_tokens."),
        (r"^gpt_neox\.final_layer_norm\.", "model.norm."),
        (r"^gpt_neox\.", "model."),
        (r"\.attention\.query_key_value\.", ".self_attn.qkv_proj."),
        (r"\.attention\.dense\.", ".self_attn.o_proj."),
        (r"\.mlp\.dense_h_to_4h\.", ".mlp.up_proj."),
        (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
    ),
    # Masks.
    skipped=r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$",
)


@family("GPTNeoXForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """A quarter of a head is rotated unless stated."""
    config = config.aliased(partial_rotary_factor="rotary_pct", rope_theta="rotary_emb_base")
    is_parallel = config.flag("use_parallel_residual", True)
    return decoder_spec(
        config,
        **attention_biases(config, default=True),
        **layer_norms(config),
        ropes=(config.rope(head_size(config), default_partial=0.25),),
        num_kv_heads=config.count("num_attention_heads"),
        mlp_bias=True,
        activation=activation(config, default="gelu"),
        gated=False,
        fused_qkv="whole" if config.text("qkv_layout", "by_head") == "whole" else "by_head",
        norm_placement="parallel" if is_parallel else "pre",
        names=_NAMES,
    )
