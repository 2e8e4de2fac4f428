"""GTE: BERT's norms, with rotated heads and gated feed-forwards."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import activation, family
from engine.model.families.bert import encoder_fields
from engine.model.spec import ModelSpec, TensorNames

_NAMES = TensorNames(
    renamed=(
        (r"^new\.", ""),
        (r"^embeddings\.word_embeddings\.", "model.embed_tokens."),
        (r"^embeddings\.token_type_embeddings\.", "model.embed_types."),
        (r"^embeddings\.LayerNorm\.", "model.embed_norm."),
        (r"^encoder\.layer\.", "model.layers."),
        (r"\.attn_ln\.", ".post_attention_layernorm."),
        (r"\.mlp_ln\.", ".post_feedforward_layernorm."),
        (r"\.attention\.qkv_proj\.", ".self_attn.qkv_proj."),
        (r"\.attention\.o_proj\.", ".self_attn.o_proj."),
        (r"\.mlp\.up_gate_proj\.", ".mlp.gate_up_proj."),
    ),
    skipped=r"(new\.)?pooler\.|lm_head\.",
)


@family("GteModel")
@family("NewModel")
def read(config: ConfigReader) -> ModelSpec:
    """All sizes."""
    config.require("layer_norm_type", "layer_norm", "layer_norm")
    config.require("position_embedding_type", "rope", "rope")
    head_dim = config.count("hidden_size") // config.count("num_attention_heads")
    rope = config.rope(head_dim, default_theta=160_000.0)
    fields = encoder_fields(
        config,
        norm_bias=True,
        norm_eps=config.number("layer_norm_eps", 1e-12),
        norm_placement="sum",
        final_norm=False,
        activation=activation(config, default="gelu"),
        fused_qkv="whole",
        fused_gate_up=True,
        up_first=True,
        qkv_bias=True,
        output_bias=True,
        down_bias=True,
        num_segments=config.integer("type_vocab_size", 1),
        ropes=(rope,),
        max_positions=rope.usable_positions,
        names=_NAMES,
    )
    return ModelSpec(**fields)
