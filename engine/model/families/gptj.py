"""GPT-J: both half layers side by side under one norm, a part of each head rotated, a head with biases."""

from __future__ import annotations

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.base import activation, decoder_spec, family, head_size, layer_norms
from engine.model.spec import CheckpointError, ModelSpec, TensorNames

_NAMES = TensorNames(
    renamed=(
        (r"^transformer\.wte\.", "model.embed_tokens."),
        (r"^transformer\.ln_f\.", "model.norm."),
        (r"^transformer\.h\.", "model.layers."),
        (r"\.ln_1\.", ".input_layernorm."),
        (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.attn\.", ".self_attn."),
        (r"\.mlp\.fc_in\.", ".mlp.up_proj."),
        (r"\.mlp\.fc_out\.", ".mlp.down_proj."),
    ),
    # Masks.
    skipped=r"transformer\.h\.\d+\.attn\.(bias|masked_bias|embed_positions)$",
)


@family("GPTJForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Sixty-four dimensions of a head are rotated unless stated."""
    config = config.aliased(
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="n_positions",
        intermediate_size="n_inner",
        num_key_value_heads="n_head",
    )
    rope, rotated = config.rope(head_size(config)), config.count("rotary_dim", min(64, head_size(config)))
    if rotated > rope.rotary_dim or rotated % 2:
        raise CheckpointError(
            f"{config.source}: rotary_dim = {rotated} is no even number up to the {rope.rotary_dim} of a head"
        )
    return decoder_spec(
        config,
        **layer_norms(config, "layer_norm_epsilon"),
        intermediate_size=config.count("intermediate_size", 4 * config.count("hidden_size")),
        ropes=(msgspec.structs.replace(rope, rotary_dim=rotated, interleaved=True),),
        mlp_bias=True,
        head_bias=True,
        activation=activation(config, "activation_function", "gelu_new"),
        gated=False,
        norm_placement="parallel_shared",
        names=_NAMES,
    )
