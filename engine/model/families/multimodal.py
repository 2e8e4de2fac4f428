"""Models that see or hear, served as the text model that they contain: what belongs to images and sound is
left in the checkpoint, which a log line says, and requests that bring some are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from engine.model.checkpoint import read_headers
from engine.model.config_reader import ConfigReader
from engine.model.families.base import FAMILIES, NORM_EPS_KEY, Family, family, head_size
from engine.model.spec import CheckpointError, ModelSpec, TensorNames
from runtime.errors import ConfigError

# Kind of text model, as its own configuration names it, to what reads it.
_TEXT_MODELS = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "glm4v_text": "Glm4ForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "hyperclovax": "HyperCLOVAXForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_omni_text": "Qwen2ForCausalLM",
    "qwen3_omni_moe_text": "Qwen3MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
}
# What configurations leave to transformers' defaults.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
    },
    "qwen2": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
    },
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
    },
    "gemma3n_text": {
        "vocab_size": 262_400,
        "hidden_size": 2048,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "max_position_embeddings": 32_768,
    },
    "gemma4_text": {
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
    },
}
for _qwen in ("qwen2_5_vl", "qwen2_5_vl_text"):
    _DEFAULTS[_qwen] = {NORM_EPS_KEY: 1e-5}
for _glm in ("glm4v_text", "glm4v_moe_text"):
    _DEFAULTS[_glm] = {NORM_EPS_KEY: 1e-5}
_DEFAULTS["glm4v_moe_text"] |= {"attention_bias": True}
_DEFAULTS["qwen3_vl_moe_text"] = {"num_experts_per_tok": 4}
_DEFAULTS["qwen3_omni_moe_text"] = {"norm_topk_prob": True}
# And bases of rotations, where they state none.
_BASES = {
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), 1_000_000.0),
    **dict.fromkeys(("qwen2_5_omni_text", "qwen3_omni_moe_text"), 1_000_000.0),
    **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text"), 500_000.0),
}
_DEFAULTS["gemma4_unified_text"] = _DEFAULTS["gemma4_text"] | {"max_position_embeddings": 262_144}
_PREFIXES = (
    (r"^thinker\.", ""),
    (r"^(model\.)?(language_model|text_model)\.(model\.|backbone\.)?", "model."),
    (r"^model\.lm_head\.", "lm_head."),
)
_SKIPPED = (
    r"(mtp|talker|token2wav|code2wav)\.|(thinker\.)?(model\.)?(vision_tower|vision_model|vision_encoder|vision_embedder|visual|visual_embeddings_table|"
    r"connector|multi_modal_projector|mm_projector|projector|vision_projector|vision_projection|image_tower|"
    r"video_tower|aligner|mlp1|merger|audio_tower|sound_encoder|sound_projection|vision_final_layernorm|embed_vision|embed_audio|image_newline)(\.|$)"
)
WHOLES = (
    "AyaVisionForConditionalGeneration",
    "DeepseekVLForConditionalGeneration",
    "Exaone4_5_ForConditionalGeneration",
    "FastVlmForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "Glm46VForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "GotOcr2ForConditionalGeneration",
    "HyperCLOVAXVisionV2ForConditionalGeneration",
    "Idefics2ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",
    "Lfm2VlForConditionalGeneration",
    "LightOnOcrForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaNextVideoForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "MiniCPMV4_6ForConditionalGeneration",
    "MiniCPMV4_7ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "NemotronH_Omni_Reasoning_V3",
    "Ovis2ForConditionalGeneration",
    "QianfanOCRForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniModel",
    "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "VideoLlama3ForConditionalGeneration",
    "VideoLlavaForConditionalGeneration",
    "VipLlavaForConditionalGeneration",
)


def read_text_part(config: ConfigReader) -> ModelSpec:
    """The text model of a whole whose configuration is nested, or flat as Qwen2-VL's first ones are."""
    # What a model that speaks as well thinks with.
    config = ConfigReader(config.values.get("thinker_config") or config.values, config.source)
    text = config.values.get("text_config") or config.values.get("llm_config") or config.values
    if not isinstance(text, dict):
        raise CheckpointError(f"{config.source}: text_config = {text!r} is not a table of keys")
    kind = text.get("model_type")
    reader = _reader_of(kind, config.source)
    types = {key: config.values[key] for key in ("dtype", "torch_dtype") if key in config.values}
    # The head belongs to the whole.
    tied = {key: config.values[key] for key in ("tie_word_embeddings",) if key in config.values}
    values = {**types, **_DEFAULTS.get(str(kind), {}), **text, **tied}
    if kind == "glm4v_text" and values.get("head_dim") is None:
        # GLM-4 would have 128, and rotate a half of it.
        values["head_dim"] = head_size(ConfigReader(values, f"{config.source}: text_config"))
        rotation = values.get("rope_parameters") or values.get("rope_scaling") or {}
        if "partial_rotary_factor" not in rotation:
            values.setdefault("partial_rotary_factor", 1.0)
    inner = ConfigReader(values, f"{config.source}: text_config")
    if kind in _BASES and values.get("rope_theta") is None:
        inner = inner.turned({"rope_type": "default", "rope_theta": _BASES[kind]})
    spec = reader(inner)
    if kind == "qwen3_vl_moe_text" and spec.experts is not None:
        # Its experts share tensors, and their weights sum to one whatever is said.
        experts = msgspec.structs.replace(spec.experts, layout="inputs_first", normalized=True)
        spec = msgspec.structs.replace(spec, experts=experts)
    skipped = f"{_SKIPPED}|{spec.names.skipped}" if spec.names.skipped else _SKIPPED
    names = TensorNames(renamed=(*_PREFIXES, *spec.names.renamed), skipped=skipped)
    return msgspec.structs.replace(spec, names=names)


def tied_as_stored(spec: ModelSpec, folder: Path) -> ModelSpec:
    """The spec of a whole with the head that its files have: whether that is the embedding is said by the
    whole, by its text model, or by neither.
    """
    try:
        stored = spec.names.of(read_headers(folder))
    except ConfigError:
        # Nothing but a configuration is there.
        return spec
    return msgspec.structs.replace(spec, tied_embeddings="lm_head.weight" not in stored)


def _reader_of(kind: Any, source: str) -> Family:
    if kind not in _TEXT_MODELS:
        raise CheckpointError(
            f"{source}: a text model of model_type = {kind!r} is not supported here; supported are "
            f"{', '.join(sorted(_TEXT_MODELS))}"
        )
    return FAMILIES[_TEXT_MODELS[kind]]


for _name in WHOLES:
    family(_name)(read_text_part)
