"""Low-rank adapters (LoRA, arXiv 2106.09685) of a model in training, and the folder that PEFT would write.

A linear layer computes x W^T + (x A^T) B^T * alpha / r; A and B alone are trained.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraLinear(nn.Module):
    """A frozen linear layer and its adapter."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features))
        # It begins as the base model.
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs]."""
        change = nn.functional.linear(nn.functional.linear(x, self.lora_a), self.lora_b)
        out: Tensor = self.base(x) + self.scale * change
        return out


def adapt(model: nn.Module, *, rank: int, alpha: float) -> list[nn.Parameter]:
    """Gives every linear layer of the decoder an adapter; returns what is to be trained."""
    model.requires_grad_(False)
    trained: list[nn.Parameter] = []
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in TARGETS and isinstance(child, nn.Linear):
                adapted = LoraLinear(child, rank, alpha)
                setattr(module, name, adapted)
                trained += [adapted.lora_a, adapted.lora_b]
    return trained


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """Each adapter, by the name of its layer."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def export_adapter(model: nn.Module, folder: Path, *, base: str, rank: int, alpha: float) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors` (bfloat16) as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, layer in adapted_layers(model):
        for part, values in (("A", layer.lora_a), ("B", layer.lora_b)):
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = values.detach().to(torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(TARGETS),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
