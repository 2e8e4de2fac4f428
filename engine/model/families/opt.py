"""OPT: learned positions behind two that nobody has, layer norms, biases, and a feed-forward without gate."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import activation, decoder_spec, family
from engine.model.spec import ModelSpec, RopeSpec, TensorNames

_NAMES = TensorNames(
    renamed=(
        # The first checkpoints leave it out.
        (r"^(model\.)?decoder\.", "model."),
        (r"^model\.final_layer_norm\.", "model.norm."),
        (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.self_attn_layer_norm\.", ".input_layernorm."),
        (r"\.final_layer_norm\.", ".post_attention_layernorm."),
        (r"\.fc1\.", ".mlp.up_proj."),
        (r"\.fc2\.", ".mlp.down_proj."),
    )
)


@family("OPTForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """All sizes but OPT-350M, which has norms behind half layers, and embeddings of another size."""
    config.require("do_layer_norm_before", True, True)
    config.require("_remove_final_layer_norm", False, False)
    hidden = config.count("hidden_size")
    config.require("word_embed_proj_dim", hidden, hidden)
    biases, learned = config.flag("enable_bias", True), config.flag("layer_norm_elementwise_affine", True)
    return decoder_spec(
        config,
        norm="layer",
        norm_weights=learned,
        norm_bias=learned,
        norm_eps=1e-5,
        intermediate_size=config.count("ffn_dim"),
        ropes=(RopeSpec(rotary_dim=0, max_positions=config.count("max_position_embeddings")),),
        num_kv_heads=config.count("num_attention_heads"),
        learned_positions=True,
        position_offset=2,
        qkv_bias=biases,
        output_bias=biases,
        mlp_bias=biases,
        activation=activation(config, "activation_function", "relu"),
        gated=False,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        names=_NAMES,
    )
