"""BERT and RoBERTa: encoders with learned positions, whose norms take the place of the stream. E5, BGE,
MiniLM and most cross-encoders are one or the other.
"""

from __future__ import annotations

from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.families.base import activation, checkpoint_dtype, family
from engine.model.spec import CheckpointError, ModelSpec, RopeSpec, TensorNames

_NAMES = TensorNames(
    renamed=(
        (r"^(bert|roberta)\.", ""),
        (r"^embeddings\.word_embeddings\.", "model.embed_tokens."),
        (r"^embeddings\.position_embeddings\.", "model.embed_positions."),
        (r"^embeddings\.token_type_embeddings\.", "model.embed_types."),
        (r"^embeddings\.LayerNorm\.", "model.embed_norm."),
        (r"^encoder\.layer\.", "model.layers."),
        (r"\.attention\.self\.(query|key|value)\.", r".self_attn.\1_proj."),
        (r"\.query_proj\.", ".q_proj."),
        (r"\.key_proj\.", ".k_proj."),
        (r"\.value_proj\.", ".v_proj."),
        (r"\.attention\.output\.dense\.", ".self_attn.o_proj."),
        (r"\.attention\.output\.LayerNorm\.", ".post_attention_layernorm."),
        (r"\.intermediate\.dense\.", ".mlp.up_proj."),
        (r"^(model\.layers\.\d+)\.output\.dense\.", r"\1.mlp.down_proj."),
        (r"^(model\.layers\.\d+)\.output\.LayerNorm\.", r"\1.post_feedforward_layernorm."),
        # As the first checkpoints have them.
        (r"norm\.gamma$", "norm.weight"),
        (r"norm\.beta$", "norm.bias"),
    ),
    skipped=r"(bert\.|roberta\.)?embeddings\.(position|token_type)_ids$|cls\.|lm_head\.",
)
_WITHOUT_POOLER = TensorNames(
    renamed=_NAMES.renamed, skipped=_NAMES.skipped + r"|(bert\.|roberta\.)?pooler\."
)


def encoder_fields(config: ConfigReader, **overrides: Any) -> dict[str, Any]:
    """What encoders have in common: every head its own keys, all looked at from everywhere."""
    num_heads, hidden = config.count("num_attention_heads"), config.count("hidden_size")
    num_layers = config.count("num_hidden_layers")
    if hidden % num_heads:
        raise CheckpointError(
            f"{config.source}: hidden_size = {hidden} is not a multiple of num_attention_heads = {num_heads}"
        )
    return {
        "vocab_size": config.count("vocab_size"),
        "num_embeddings": config.count("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": config.count("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": hidden // num_heads,
        "attention_scale": (hidden // num_heads) ** -0.5,
        "dtype": checkpoint_dtype(config),
        "bidirectional": True,
        "norm": "layer",
        "rope_of_layer": (0,) * num_layers,
        "windows": (None,) * num_layers,
        "embedding_norm": True,
    } | overrides


def _encoder(config: ConfigReader, *, offset: int, classifier: str, keeps_pooler: bool) -> ModelSpec:
    config.require("position_embedding_type", "absolute", "absolute")
    config.require("is_decoder", False, False)
    positions = config.count("max_position_embeddings") - offset
    if positions < 1:
        raise CheckpointError(
            f"{config.source}: max_position_embeddings leaves no position behind the first {offset}"
        )
    fields = encoder_fields(
        config,
        norm_bias=True,
        norm_eps=config.number("layer_norm_eps", 1e-12),
        norm_placement="sum",
        final_norm=False,
        activation=activation(config, default="gelu"),
        gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        learned_positions=True,
        position_offset=offset,
        num_segments=config.count("type_vocab_size", 2),
        ropes=(RopeSpec(rotary_dim=0, max_positions=positions),),
        max_positions=positions,
        classifier=classifier,
        names=_NAMES if keeps_pooler else _WITHOUT_POOLER,
    )
    return ModelSpec(**fields)


@family("BertModel")
def read_bert(config: ConfigReader) -> ModelSpec:
    """Embeddings, of texts alone."""
    return _encoder(config, offset=0, classifier="bert", keeps_pooler=False)


@family("BertForSequenceClassification")
def read_bert_classifier(config: ConfigReader) -> ModelSpec:
    """With its pooler, and labels of a text or a pair."""
    return _encoder(config, offset=0, classifier="bert", keeps_pooler=True)


@family("RobertaModel")
@family("XLMRobertaModel")
@family("CamembertModel")
@family("RobertaForSequenceClassification")
@family("XLMRobertaForSequenceClassification")
@family("CamembertForSequenceClassification")
def read_roberta(config: ConfigReader) -> ModelSpec:
    """Positions begin behind that of padding, and texts of a pair are not told apart."""
    offset = config.integer("pad_token_id", 1) + 1
    return _encoder(config, offset=offset, classifier="roberta", keeps_pooler=False)
