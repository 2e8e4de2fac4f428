"""GPT-2: learned positions, layer norms, biases everywhere, weights stored with their inputs first."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import activation, decoder_spec, family, layer_norms
from engine.model.spec import ModelSpec, RopeSpec, TensorNames

_NAMES = TensorNames(
    renamed=(
        # The first checkpoints leave it out.
        (r"^(transformer\.)?(?=h\.|wte\.|wpe\.|ln_f\.)", ""),
        (r"^wte\.", "model.embed_tokens."),
        (r"^wpe\.", "model.embed_positions."),
        (r"^ln_f\.", "model.norm."),
        (r"^h\.", "model.layers."),
        (r"\.ln_1\.", ".input_layernorm."),
        (r"\.ln_2\.", ".post_attention_layernorm."),
        (r"\.attn\.c_attn\.", ".self_attn.qkv_proj."),
        (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
        (r"\.mlp\.c_fc\.", ".mlp.up_proj."),
        (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
    ),
    # Masks.
    skipped=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)$",
)


@family("GPT2LMHeadModel")
def read(config: ConfigReader) -> ModelSpec:
    """All sizes."""
    config.require("scale_attn_weights", True, True)
    config.require("scale_attn_by_inverse_layer_idx", False, False)
    config.require("add_cross_attention", False, False)
    config = config.aliased(
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="n_positions",
        intermediate_size="n_inner",
        num_key_value_heads="n_head",
    )
    positions = config.count("max_position_embeddings")
    return decoder_spec(
        config,
        **layer_norms(config, "layer_norm_epsilon"),
        intermediate_size=config.count("intermediate_size", 4 * config.count("hidden_size")),
        ropes=(RopeSpec(rotary_dim=0, max_positions=positions),),
        learned_positions=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        activation=activation(config, "activation_function", "gelu_new"),
        gated=False,
        fused_qkv="whole",
        inputs_first=True,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        names=_NAMES,
    )
