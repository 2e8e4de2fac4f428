"""ModernBERT: an encoder of pre-norms, rotated heads and gated feed-forwards, most of whose layers look
near.
"""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import activation, family
from engine.model.families.bert import encoder_fields
from engine.model.spec import ModelSpec, TensorNames

_NAMES = TensorNames(
    renamed=(
        (r"^model\.", ""),
        (r"^embeddings\.tok_embeddings\.", "model.embed_tokens."),
        (r"^embeddings\.norm\.", "model.embed_norm."),
        (r"^final_norm\.", "model.norm."),
        (r"^layers\.", "model.layers."),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.mlp_norm\.", ".post_attention_layernorm."),
        (r"\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
        (r"\.attn\.Wo\.", ".self_attn.o_proj."),
        (r"\.mlp\.Wi\.", ".mlp.gate_up_proj."),
        (r"\.mlp\.Wo\.", ".mlp.down_proj."),
    ),
    skipped=r"decoder\.",
)


@family("ModernBertModel")
@family("ModernBertForSequenceClassification")
def read(config: ConfigReader) -> ModelSpec:
    """All sizes."""
    for name in ("norm_bias", "mlp_bias", "attention_bias", "classifier_bias"):
        config.require(name, False, False)
    num_layers = config.count("num_hidden_layers")
    every = config.count("global_attn_every_n_layers", 3)
    types = config.layer_types(num_layers)
    looks_far = (
        [name == "full_attention" for name in types] if types else [i % every == 0 for i in range(num_layers)]
    )
    # Half of what a token sees lies behind it.
    window = config.count("local_attention", 128) // 2 + 1
    config.require("classifier_activation", "gelu", "gelu")
    head_dim = config.count("hidden_size") // config.count("num_attention_heads")
    ropes = tuple(
        config.rope(head_dim, layer_type=layer_type, default_theta=config.number(key, default))
        for layer_type, key, default in (
            ("full_attention", "global_rope_theta", 160_000.0),
            ("sliding_attention", "local_rope_theta", 10_000.0),
        )
    )
    fields = encoder_fields(
        config,
        norm_eps=config.number("norm_eps", 1e-5),
        first_norm=False,
        activation=activation(config, "hidden_activation", "gelu"),
        fused_qkv="whole",
        fused_gate_up=True,
        ropes=ropes,
        rope_of_layer=tuple(0 if far else 1 for far in looks_far),
        windows=tuple(None if far else window for far in looks_far),
        max_positions=ropes[0].usable_positions,
        classifier="modernbert",
        names=_NAMES,
    )
    return ModelSpec(**fields)
