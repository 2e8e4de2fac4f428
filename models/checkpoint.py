"""Checkpoints: the resumable training state, and the Hugging Face folder that everybody else loads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from models.architecture import END_OF_TEXT_ID, IM_END_ID, LanguageModel, model_config


def export(model: LanguageModel, folder: Path) -> None:
    """Write `model.safetensors` (bfloat16), `config.json` and `generation_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    # The head is the embedding.
    weights = {
        name: value.to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
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
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict({name: value.float() for name, value in weights.items()})
