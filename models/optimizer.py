"""Muon for the hidden matrices, AdamW for the embedding and the norms, under one learning-rate factor."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

MATRIX_RATE = 0.02
EMBEDDING_RATE = 3e-3
GRADIENT_NORM = 1.0


class Optimizers:
    """Both optimizers of one model, stepped together."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        named = dict(model.named_parameters())
        matrices = [value for name, value in named.items() if value.ndim == 2 and "embed" not in name]
        others = [value for name, value in named.items() if value.ndim != 2 or "embed" in name]
        self.muon = torch.optim.Muon(
            matrices, lr=MATRIX_RATE, weight_decay=0.01, momentum=0.95, nesterov=True
        )
        self.adamw = torch.optim.AdamW(others, lr=EMBEDDING_RATE, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, factor: float) -> None:
        """Clip, update with both learning rates times `factor`, and clear the gradients."""
        torch.nn.utils.clip_grad_norm_(self.parameters, GRADIENT_NORM)
        for optimizer, rate in ((self.muon, MATRIX_RATE), (self.adamw, EMBEDDING_RATE)):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()  # type: ignore[no-untyped-call]
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])
