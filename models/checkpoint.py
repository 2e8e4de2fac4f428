"""Checkpoints: the resumable training state, and the Hugging Face folder that everybody else loads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from models.architecture import LanguageModel, Shape
from models.tokenizer import CONTROL_TOKENS, VOCABULARY_SIZE

END_OF_TEXT_ID, IM_END_ID = CONTROL_TOKENS.index("<|endoftext|>"), CONTROL_TOKENS.index("<|im_end|>")


def model_config(shape: Shape) -> dict[str, object]:
    """`config.json` as `transformers` expects it for Qwen3."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": IM_END_ID,
        "pad_token_id": END_OF_TEXT_ID,
        "torch_dtype": "bfloat16",
    }


def export(model: LanguageModel, folder: Path) -> None:
    """Write `model.safetensors` (bfloat16), `config.json` and `generation_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    generation = {
        "eos_token_id": [IM_END_ID, END_OF_TEXT_ID],
        "pad_token_id": END_OF_TEXT_ID,
        "do_sample": False,
    }
    for name, content in (("config", model_config(model.shape)), ("generation_config", generation)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def import_weights(model: LanguageModel, folder: Path) -> None:
    """Load exported weights into float32 parameters."""
    model.load_state_dict(
        {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    )
