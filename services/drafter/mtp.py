"""A layer that predicts further tokens (MTP: DeepSeek-V3, arXiv 2412.19437), as torch trains it for a model
that has none, and its file in the `speculators` format; `engine/model/mtp` says what it computes.

Embedding and head are the target's, and stay as they are; it is trained as it drafts, as EAGLE-3's head is.

Shape letters: B lessons, T tokens, E hidden size, V vocabulary, R rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from services.drafter.head import (
    EPS,
    DraftingLayer,
    HeadShape,
    TrainedHead,
    drafted,
    shape_for,
    speculators_form,
)
from services.drafter.target import DraftedModel


class _PredictingLayer(DraftingLayer):
    """Qwen3's, with what is before it and the norm behind it."""

    def __init__(self, shape: HeadShape) -> None:
        size = shape.hidden_size
        super().__init__(shape, size, has_norms=True)
        self.token_layernorm, self.hidden_layernorm, self.final_layernorm = (
            nn.RMSNorm(size, eps=EPS) for _ in range(3)
        )
        self.input_proj = nn.Linear(2 * size, size, bias=False)

    def forward(
        self, tokens: Tensor, hidden: Tensor, offset: int, earlier: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """See DraftingLayer."""
        joined = torch.cat((self.token_layernorm(tokens), self.hidden_layernorm(hidden)), -1)
        stream = self.input_proj(joined)
        out: Tensor = self.final_layernorm(
            self.advance(stream, self.input_layernorm(stream), offset, earlier)
        )
        return out


class TrainedPredictor(TrainedHead):
    """One layer over what the target's own head reads; its parameters are named as their tensors."""

    def __init__(self, target: DraftedModel, model: str, kept_ids: Tensor, num_rounds: int) -> None:
        """`kept_ids` are all that the target draws; further rounds need nothing more."""
        super().__init__()
        assert kept_ids.numel() == target.spec.vocab_size, "the target's head draws them all"
        self.shape = shape_for(target, model, kept_ids.numel())
        weight, bias = target.head()
        for name, values in (
            ("kept_ids", kept_ids),
            ("embedding", target.embedding()),
            ("weight", weight),
            ("bias", bias),
        ):
            self.register_buffer(name, values, persistent=False)
        layer = _PredictingLayer(self.shape)
        self.mtp_layers = nn.ModuleList([layer])
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        with torch.no_grad():
            # The hidden state is nearer to what is drawn than the token behind it.
            layer.input_proj.weight[:, self.shape.hidden_size :] += torch.eye(self.shape.hidden_size)

    def rounds(self, states: Tensor, ids: Tensor, num_rounds: int) -> list[Tensor]:
        """See TrainedHead; states [B, T, E]."""
        assert isinstance(self.embedding, Tensor), "a buffer"
        return drafted(self.mtp_layers[0], self.embedding, states, ids, num_rounds)

    def logits(self, hidden: Tensor, number: int) -> Tensor:
        """See TrainedHead; all rounds have the target's."""
        assert isinstance(self.weight, Tensor), "a buffer"
        assert isinstance(self.bias, Tensor), "as above"
        return nn.functional.linear(hidden, self.weight, self.bias)

    def tensors(self) -> dict[str, Tensor]:
        """See TrainedHead; there are none."""
        return {}

    def config(self) -> dict[str, Any]:
        """See TrainedHead; the format has as many layers there as the target."""
        (num_layers,) = self.shape.layers
        form = speculators_form(self.shape, "mtp", "MTPDraftModel", model_type="qwen3", num_layers=num_layers)
        return form | {"num_nextn_predict_layers": 1}
