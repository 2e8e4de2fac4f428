"""Random adapters, written as PEFT writes them, and merged into transformers' models by its formula."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: transformers.PreTrainedModel,
    *,
    r: int = 4,
    targets: tuple[str, ...] = ALL,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Callable[[transformers.PreTrainedModel], transformers.PreTrainedModel]:
    """Writes a random adapter of the linear layers whose names end with `targets`; returns what merges it."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"peft_type": "LORA", "r": r, "lora_alpha": 8, "target_modules": list(targets)} | config
    generator = torch.Generator().manual_seed(seed)
    tensors, merged = {}, {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or not name.endswith(targets):
            continue
        rank = by_pattern(values.get("rank_pattern", {}), name, r)
        alpha = by_pattern(values.get("alpha_pattern", {}), name, values["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if values.get("use_rslora") else rank)
        a = (torch.randn(rank, module.in_features, generator=generator) * 0.1).to(dtype)
        b = (torch.randn(module.out_features, rank, generator=generator) * 0.2).to(dtype)
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        merged[f"{name}.weight"] = scale * (b.float() @ a.float())
    assert tensors, targets
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(values))

    def merge(base: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
        changed = copy.deepcopy(base)
        with torch.no_grad():
            for name, parameter in changed.named_parameters():
                if name in merged:
                    parameter.add_(merged[name])
        return changed

    return merge


def by_pattern(patterns: dict[str, Any], name: str, usual: Any) -> Any:
    """As PEFT documents it: a key matches the end of a module's name."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), usual)
