"""Heads of Medusa as torch trains them (Medusa-1: the target stays as it is; arXiv 2401.10774), and their
files in the form that vLLM loads, too; `engine/model/medusa` says what they compute.

Shape letters: B lessons, T tokens, E hidden size, V ids that they draw, R rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from services.drafter.head import TrainedHead
from services.drafter.target import DraftedModel

# Products of a head before the one that makes logits.
_NUM_LAYERS = 1


class _Block(nn.Module):
    """x + silu(W x + b), layer by layer: at first x itself."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(_NUM_LAYERS))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + nn.functional.silu(layer(x))
        return x


class TrainedMedusa(TrainedHead):
    """Heads over what the target's own head reads, one for each draft; parameters are named as tensors."""

    def __init__(self, target: DraftedModel, model: str, kept_ids: Tensor, num_heads: int) -> None:
        super().__init__()
        spec = target.spec
        self.register_buffer("kept_ids", kept_ids, persistent=False)
        self.model, self.vocab_size, self.hidden_size = model, spec.num_embeddings, spec.hidden_size
        self.blocks = nn.ModuleList([_Block(spec.hidden_size) for _ in range(num_heads)])
        self.lm_heads = nn.ModuleList(
            [nn.Linear(spec.hidden_size, kept_ids.numel(), bias=False) for _ in range(num_heads)]
        )
        with torch.no_grad():
            for head in self.lm_heads:
                assert isinstance(head, nn.Linear), "made above"
                if spec.tied_embeddings:
                    head.weight.copy_(target.embedding()[kept_ids])
                else:
                    nn.init.normal_(head.weight, std=0.02)

    def rounds(self, states: Tensor, ids: Tensor, num_rounds: int) -> list[Tensor]:
        """See TrainedHead; states [B, T, E]."""
        return [block(states) for block in list(self.blocks)[:num_rounds]]

    def logits(self, hidden: Tensor, number: int) -> Tensor:
        """See TrainedHead."""
        out: Tensor = self.lm_heads[number](hidden)
        return out

    def tensors(self) -> dict[str, Tensor]:
        """See TrainedHead."""
        return {"token_map": self.kept_ids} if self.kept_ids.numel() < self.vocab_size else {}

    def config(self) -> dict[str, Any]:
        """See TrainedHead."""
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "base_model_name_or_path": self.model,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "truncated_vocab_size": self.kept_ids.numel(),
            "medusa_num_heads": len(self.blocks),
            "medusa_num_layers": _NUM_LAYERS,
            "medusa_fc_bias": True,
            "torch_dtype": "bfloat16",
        }
