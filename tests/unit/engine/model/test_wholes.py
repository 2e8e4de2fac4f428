"""Models that see or hear, of which the text model is served: it computes what transformers computes of text
alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.model.families import FAMILIES, read_spec
from engine.model.spec import CheckpointError
from tests.unit.engine.checkpoints import edit_config, make_checkpoint, reference_greedy
from tests.unit.engine.model.equality import assert_equals_transformers
from tests.unit.engine.model.hybrids import DELTA
from tests.unit.engine.runner.driver import Job, generated, prompt_of

MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 2, 2]}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
DEEP = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 24,
    "out_hidden_size": 48,
    "image_size": 16,
    "patch_size": 4,
}
HEARING = {
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "output_dim": 48,
    "num_mel_bins": 8,
}
GLM_ROPE = {
    "rope_type": "default",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [1, 1, 1],
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
EXPERTS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
}
MAMBA = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention"],
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "ssm_state_size": 20,
    "n_groups": 3,
}
CLIP, SIGLIP, PIXTRAL = (
    VISION | {"model_type": name} for name in ("clip_vision_model", "siglip_vision_model", "pixtral")
)


def seen(text: str, vision: dict[str, Any], **others: Any) -> dict[str, Any]:
    """A whole whose text model is of a kind of its own name."""
    return {"text_config": {"model_type": text}, "vision_config": vision, **others}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3-seeing": (
        "gemma3",
        {
            "text_config": {"head_dim": 16, "sliding_window": 9, "num_hidden_layers": 3},
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
        },
    ),
    "mistral3-seeing": (
        "mistral3",
        {
            "text_config": {"model_type": "mistral", "head_dim": 16},
            "vision_config": VISION | {"model_type": "pixtral"},
        },
    ),
    "llama4-seeing": (
        "llama4",
        {
            "text_config": {
                "head_dim": 16,
                "num_local_experts": 3,
                "num_experts_per_tok": 1,
                "intermediate_size_mlp": 40,
                "pad_token_id": 0,
            },
            "vision_config": VISION
            | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
        },
    ),
    "qwen2.5-vl": (
        "qwen2_5_vl",
        {
            "text_config": {"rope_parameters": MROPE},
            "vision_config": DEEP,
        },
    ),
    "qwen3-vl": (
        "qwen3_vl",
        {
            "text_config": {"rope_parameters": MROPE, "head_dim": 12},
            "vision_config": DEEP | {"deepstack_visual_indexes": [0]},
        },
    ),
    "qwen3-vl-moe": (
        "qwen3_vl_moe",
        {
            "text_config": {
                "rope_parameters": MROPE,
                "head_dim": 12,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 20,
            },
            "vision_config": DEEP | {"deepstack_visual_indexes": [0]},
        },
    ),
    "smolvlm": (
        "smolvlm",
        {
            "text_config": {"model_type": "llama", "pad_token_id": 0},
            "vision_config": VISION,
            "scale_factor": 2,
        },
    ),
    "idefics3": (
        "idefics3",
        {
            "text_config": {"model_type": "llama", "pad_token_id": 0},
            "vision_config": VISION,
            "scale_factor": 2,
        },
    ),
    "idefics2": (
        "idefics2",
        {
            "text_config": {"model_type": "mistral", "pad_token_id": 0},
            "vision_config": VISION,
            "perceiver_config": {
                "resampler_n_latents": 2,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "resampler_head_dim": 8,
                "num_key_value_heads": 1,
            },
        },
    ),
    "llava-next": ("llava_next", seen("llama", CLIP)),
    "llava-next-video": ("llava_next_video", seen("llama", CLIP)),
    "llava-onevision": ("llava_onevision", seen("qwen2", SIGLIP)),
    "video-llava": ("video_llava", seen("llama", CLIP)),
    "vipllava": ("vipllava", seen("llama", CLIP, vision_feature_layers=[-1, -1])),
    "lfm2-vl": (
        "lfm2_vl",
        {
            "text_config": {
                "model_type": "lfm2",
                "layer_types": ["conv", "full_attention"],
                "block_auto_adjust_ff_dim": False,
            },
            "vision_config": VISION | {"model_type": "siglip2_vision_model", "num_patches": 16},
        },
    ),
    "exaone-4.5": (
        "exaone4_5",
        {
            "text_config": {"model_type": "exaone4", "sliding_window": 9, "sliding_window_pattern": 2},
            "vision_config": DEEP,
        },
    ),
    "got-ocr2": (
        "got_ocr2",
        seen(
            "qwen2",
            {
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 4,
                "mlp_dim": 24,
                "output_channels": 8,
                "global_attn_indexes": [0],
                "window_size": 2,
            },
        ),
    ),
    "kimi-k2.5": (
        "kimi_k25",
        {
            "text_config": LATENT
            | EXPERTS
            | {
                "model_type": "deepseek_v3",
                "num_hidden_layers": 3,
                "first_k_dense_replace": 1,
                "n_group": 1,
                "topk_group": 1,
            },
            "vision_config": VISION,
        },
    ),
    "nemotron-omni": (
        "nemotron_h_omni",
        {
            "text_config": MAMBA | {"model_type": "nemotron_h"},
            "vision_config": {
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "patch_size": 4,
                "image_size": 16,
                "max_img_size": 32,
                "video_temporal_patch_size": 2,
            },
            "vision_hidden_size": 16,
            "projector_hidden_size": 24,
        },
    ),
    "hyperclovax-vision": ("hyperclovax_vision_v2", seen("hyperclovax", DEEP)),
    "lighton-ocr": ("lighton_ocr", seen("qwen3", PIXTRAL)),
    "video-llama3": ("video_llama_3", seen("qwen2", VISION)),
    "minicpm-v4.6": (
        "minicpmv4_6",
        {"text_config": DELTA | {"model_type": "qwen3_5_text"}, "vision_config": VISION},
    ),
    "minicpm-v4.7": (
        "minicpmv4_7",
        {"text_config": DELTA | {"model_type": "qwen3_5_text"}, "vision_config": VISION},
    ),
    "qianfan-ocr": ("qianfan_ocr", seen("qwen3", VISION)),
    "ovis2": ("ovis2", seen("qwen2", VISION | {"vocab_size": 32, "hidden_stride": 1})),
    "deepseek-vl": ("deepseek_vl", seen("llama", SIGLIP)),
    "mistral-small-4": (
        "mistral3",
        {
            "text_config": LATENT
            | EXPERTS
            | {
                "model_type": "mistral4",
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 10_000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.3,
                },
            },
            "vision_config": PIXTRAL,
        },
    ),
    "glm-4.1v": ("glm4v", {"text_config": {"rope_parameters": GLM_ROPE}, "vision_config": DEEP}),
    "glm-4.6v": (
        "glm46v",
        {
            "text_config": {"rope_parameters": GLM_ROPE},
            "vision_config": DEEP | {"model_type": "glm4v_vision"},
        },
    ),
    "glm-4.5v": (
        "glm4v_moe",
        {
            "text_config": EXPERTS | {"rope_parameters": GLM_ROPE, "first_k_dense_replace": 1},
            "vision_config": DEEP,
        },
    ),
    "qwen2.5-omni": (
        "qwen2_5_omni_thinker",
        {"text_config": {"rope_parameters": MROPE}, "vision_config": DEEP, "audio_config": HEARING},
    ),
    "qwen3-omni": (
        "qwen3_omni_moe_thinker",
        {
            "text_config": {
                "rope_parameters": MROPE,
                "head_dim": 12,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 20,
            },
            "vision_config": DEEP | {"deepstack_visual_indexes": [0]},
            "audio_config": HEARING | {"downsample_hidden_size": 8},
        },
    ),
}
# What transformers writes under names that are of vision layers, though published checkpoints do not.
_MISNAMED = (("model.blocks.", "model.layers."), ("model.encoder.layers.", "model.layers."))


@pytest.mark.parametrize("name", CASES)
def test_the_text_model_equals_transformers(name: str, tmp_path: Path) -> None:
    model_type, changes = CASES[name]
    oracle = make_checkpoint(tmp_path, model_type, **changes)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"][0] in FAMILIES
    if name in ("kimi-k2.5", "qianfan-ocr"):
        _rename(tmp_path / "model.safetensors")
    # In one way alone: its own family's test has them all.
    assert_equals_transformers(tmp_path, oracle, (({"native": "required"}, 13),))


def _rename(path: Path) -> None:
    def right(name: str) -> str:
        for wrong, published in _MISNAMED if name.startswith("language_model.") else ():
            name = name.replace(wrong, published)
        return name

    save_file({right(name): tensor for name, tensor in load_file(path).items()}, path)


def test_the_names_of_published_checkpoints_are_known(tmp_path: Path) -> None:
    """Kimi K2.5's, whose text model is of another kind there; and of what speaks as well as it thinks."""
    model_type, changes = CASES["kimi-k2.5"]
    oracle = make_checkpoint(tmp_path / "kimi", model_type, **changes)
    _rename(tmp_path / "kimi" / "model.safetensors")
    text = json.loads((tmp_path / "kimi" / "config.json").read_text())["text_config"]
    edit_config(
        tmp_path / "kimi",
        architectures=["KimiK25ForConditionalGeneration"],
        text_config=text | {"model_type": "kimi_k2"},
    )
    prompt = prompt_of(20, 199)
    (job,) = generated(tmp_path / "kimi", [Job(prompt, num_tokens=6)])
    assert job.output == reference_greedy(oracle, prompt, 6)
    model_type, changes = CASES["qwen3-omni"]
    oracle = make_checkpoint(tmp_path / "omni", model_type, **changes)
    path = tmp_path / "omni" / "config.json"
    thinker = json.loads(path.read_text())
    path.write_text(
        json.dumps(
            {"architectures": ["Qwen3OmniMoeForConditionalGeneration"], "thinker_config": thinker}
            | {"dtype": "float32"}
        )
    )
    weights = tmp_path / "omni" / "model.safetensors"
    spoken = {"talker.model.norm.weight": torch.zeros(4)}
    save_file({f"thinker.{name}": tensor for name, tensor in load_file(weights).items()} | spoken, weights)
    (job,) = generated(tmp_path / "omni", [Job(prompt, num_tokens=6)])
    assert job.output == reference_greedy(oracle, prompt, 6)


@pytest.mark.parametrize("said", [(False, True), (None, None)])
def test_a_head_that_is_not_stored_is_the_embedding(
    said: tuple[bool | None, bool | None], tmp_path: Path
) -> None:
    """Whatever the whole and its text model say."""
    model_type, changes = CASES["llava-onevision"]
    changes = changes | {"text_config": changes["text_config"] | {"tie_word_embeddings": True}}
    oracle = make_checkpoint(tmp_path, model_type, **changes, tie_word_embeddings=True)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    whole, own = said
    edit_config(tmp_path, tie_word_embeddings=whole, text_config=text | {"tie_word_embeddings": own})
    prompt = prompt_of(20, 199)
    (job,) = generated(tmp_path, [Job(prompt, num_tokens=6)])
    assert job.output == reference_greedy(oracle, prompt, 6)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_what_a_text_model_leaves_out_is_as_transformers_has_it(kind: str, tmp_path: Path) -> None:
    whole = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": kind}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    spec, theirs = read_spec(tmp_path), transformers.AutoConfig.for_model(kind)
    assert (spec.hidden_size, spec.intermediate_size) == (theirs.hidden_size, theirs.intermediate_size)
    assert (spec.num_layers, spec.num_heads) == (theirs.num_hidden_layers, theirs.num_attention_heads)
    assert (spec.num_kv_heads, spec.num_embeddings) == (theirs.num_key_value_heads, theirs.vocab_size)
    assert spec.max_positions == theirs.max_position_embeddings


def test_a_text_model_that_is_not_computed_is_refused_by_its_name(tmp_path: Path) -> None:
    model_type, changes = CASES["mistral3-seeing"]
    make_checkpoint(tmp_path, model_type, **changes)
    edit_config(tmp_path, text_config={"model_type": "mamba"})
    with pytest.raises(CheckpointError, match="model_type = 'mamba'"):
        read_spec(tmp_path)


def test_experts_may_be_stored_either_way(tmp_path: Path) -> None:
    """Published checkpoints have their inputs first, what transformers saves has them last."""
    model_type, changes = CASES["qwen3-vl-moe"]
    oracle = make_checkpoint(tmp_path, model_type, **changes)
    path = tmp_path / "model.safetensors"
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path)
    prompt = prompt_of(20, 199)
    (job,) = generated(tmp_path, [Job(prompt, num_tokens=6)])
    assert job.output == reference_greedy(oracle, prompt, 6)
