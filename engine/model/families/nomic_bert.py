"""Nomic's BERT: BERT's norms, with rotated heads, gated feed-forwards and hardly any bias."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import family
from engine.model.families.bert import encoder_fields
from engine.model.spec import CheckpointError, ModelSpec, TensorNames

_NAMES = TensorNames(
    renamed=(
        (r"^embeddings\.word_embeddings\.", "model.embed_tokens."),
        (r"^embeddings\.token_type_embeddings\.", "model.embed_types."),
        (r"^emb_ln\.", "model.embed_norm."),
        (r"^encoder\.layers\.", "model.layers."),
        (r"\.norm1\.", ".post_attention_layernorm."),
        (r"\.norm2\.", ".post_feedforward_layernorm."),
        (r"\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
        (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
        # What is gated comes first.
        (r"\.mlp\.fc11\.", ".mlp.up_proj."),
        (r"\.mlp\.fc12\.", ".mlp.gate_proj."),
        (r"\.mlp\.fc2\.", ".mlp.down_proj."),
    ),
)
_OFF = (
    *("prenorm", "rotary_emb_interleaved", "use_rms_norm", "parallel_block"),
    *("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"),
)
_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu"}


@family("NomicBertModel")
def read(config: ConfigReader) -> ModelSpec:
    """The published models' switches; others are refused by name."""
    for name in _OFF:
        config.require(name, False, False)
    config.require("rotary_emb_scale_base", None, None)
    config = config.aliased(
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        intermediate_size="n_inner",
        max_position_embeddings="n_positions",
    )
    name = config.text("activation_function", "swiglu")
    if name not in _ACTIVATIONS:
        raise CheckpointError(
            f"{config.source}: activation_function = {name!r} is not supported, only swiglu and geglu"
        )
    config.require("hidden_act", "silu", "silu")
    head_dim = config.count("hidden_size") // config.count("num_attention_heads")
    rotated = int(head_dim * config.number("rotary_emb_fraction", 1.0))
    # Published models stretch their rotation beyond the length that they were trained with when a text is
    # longer, which
    # would make what a text gets depend on its length.
    rope = config.rope(rotated, default_theta=config.number("rotary_emb_base", 1000.0))
    positions = min(rope.usable_positions, config.count("max_trained_positions", rope.usable_positions))
    fields = encoder_fields(
        config,
        norm_bias=True,
        norm_eps=config.number("layer_norm_eps", config.number("layer_norm_epsilon", 1e-12)),
        norm_placement="sum",
        final_norm=False,
        activation=_ACTIVATIONS[name],
        fused_qkv="whole",
        num_segments=config.count("type_vocab_size", 2),
        ropes=(rope,),
        max_positions=positions,
        names=_NAMES,
    )
    return ModelSpec(**fields)
