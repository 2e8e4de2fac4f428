"""Small random checkpoints, written by transformers, for tests that compare with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

# Tensors are tiny; more threads would only wait for each other.
torch.set_num_threads(1)

SMALL: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


# The family's own rotation would reach far beyond the small window.
ROTATIONS: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        }
    }
}


# Text models that transformers has among those that see.
IN_WHOLES = ("mistral4",)


def make_checkpoint(
    folder: Path, model_type: str, *, seed: int = 0, **changes: Any
) -> transformers.PreTrainedModel:
    """Writes a random float32 checkpoint of `model_type` ("llama") and returns transformers' model of it.

    Weights are larger than usual, so that logits differ clearly and a wrong term shows.
    """
    values = SMALL | ROTATIONS.get(model_type, {}) | changes
    auto = transformers.AutoModelForCausalLM
    if "text_config" in changes:
        # A model that sees, whose text model has a configuration of its own.
        values = changes | {"text_config": SMALL | changes["text_config"]}
        auto = transformers.AutoModelForImageTextToText
    elif model_type in IN_WHOLES:
        auto = transformers.AutoModelForImageTextToText
    config = transformers.AutoConfig.for_model(model_type, **values)
    torch.manual_seed(seed)
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(std=0.5)
        for name, buffer in model.named_buffers():
            # Corrections of a router's choice are zeros until they are trained.
            if "correction" in name:
                buffer.normal_(std=0.2)
            elif "layer_scalar" in name:
                buffer.add_(torch.randn_like(buffer) * 0.2)
    model.eval()
    model.save_pretrained(folder)
    return model


def edit_config(folder: Path, **changes: Any) -> None:
    """Sets keys of `config.json`; None removes a key."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def reference_logits(model: transformers.PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Logits [T, V] of one prompt."""
    with torch.no_grad():
        # Caches of models that attend nowhere do not know how long they are.
        return model(torch.tensor([token_ids]), use_cache=False).logits[0].float()


def reference_greedy(
    model: transformers.PreTrainedModel, token_ids: list[int], num_tokens: int, guess: Sequence[int] = ()
) -> list[int]:
    """Greedy continuation, every step computed from scratch: no cache whose rules could differ. What holds of
    a `guess` takes one step.
    """
    ids = list(token_ids)
    while (num_drawn := len(ids) - len(token_ids)) < num_tokens:
        ahead = list(guess[num_drawn : num_tokens - 1])
        drawn = reference_logits(model, ids + ahead)[len(ids) - 1 :].argmax(-1).tolist()
        num_right = next((k for k, token in enumerate(ahead) if token != drawn[k]), len(ahead))
        ids += drawn[: num_right + 1]
    return ids[len(token_ids) :]
