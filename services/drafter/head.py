"""Heads as torch trains them, and their files, which Millrace and vLLM load. Here that of EAGLE-3 (arXiv
2503.01840) in the `speculators` format; `engine/model/eagle3` says what it computes.

Trained as it drafts ("training-time test"): in each further round its own outputs take the place of the
target's hidden states, and every position attends to what came before it in the first round, and to its own
later rounds.

Shape letters: B lessons, T tokens, E hidden size, H heads, D head dim, V ids that it draws, R rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save
from torch import Tensor, nn

from engine.model.families.base import NORM_EPS_KEY
from services.drafter.target import DraftedModel

EPS = 1e-6


class HeadShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a head, most of them its target's."""

    target: str
    architecture: str
    layers: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rope_theta: float
    max_positions: int


class _Attention(nn.Module):
    def __init__(self, shape: HeadShape, inputs: int, *, has_norms: bool) -> None:
        super().__init__()
        keys = shape.num_kv_heads * shape.head_dim
        self.shape = shape
        self.q_proj = nn.Linear(inputs, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, keys, bias=False)
        self.v_proj = nn.Linear(inputs, keys, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(shape.head_dim, eps=EPS) if has_norms else nn.Identity() for _ in range(2)
        )

    def forward(self, x: Tensor, offset: int, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """x [B, T, inputs] -> [B, T, E], `offset` tokens on; `earlier` are keys and values of the rounds
        before, to which this one's are added.
        """
        q, k, v = (
            each(x).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2) for each in self._inward()
        )
        q, k = self._turned(self.q_norm(q), offset), self._turned(self.k_norm(k), offset)
        groups = self.shape.num_heads // self.shape.num_kv_heads
        earlier.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        scale, (first_keys, first_values), later = self.shape.head_dim**-0.5, earlier[0], earlier[1:]
        length = x.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = [(q @ first_keys.transpose(-1, -2) * scale).masked_fill(future, float("-inf"))]
        scores += [(q * keys).sum(-1, keepdim=True) * scale for keys, _ in later]
        weights = torch.cat(scores, -1).softmax(-1)
        mixed = weights[..., :length] @ first_values
        for place, (_, values) in enumerate(later, length):
            mixed = mixed + weights[..., place : place + 1] * values
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return out

    def _inward(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.q_proj, self.k_proj, self.v_proj

    def _turned(self, x: Tensor, offset: int) -> Tensor:
        """x [B, H, T, D] turned by its positions, from `offset` on."""
        half = self.shape.head_dim // 2
        frequencies = self.shape.rope_theta ** (-torch.arange(half, device=x.device) / half)
        angles = (offset + torch.arange(x.shape[2], device=x.device))[:, None] * frequencies
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class _FeedForward(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftingLayer(nn.Module):
    """A decoder layer, whose attention reads so many inputs; heads say what they are, and what the stream
    begins with.
    """

    def __init__(self, shape: HeadShape, inputs: int, *, has_norms: bool = False) -> None:
        """`has_norms`: of each head's queries and keys."""
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=EPS)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=EPS)
        self.self_attn = _Attention(shape, inputs, has_norms=has_norms)
        self.mlp = _FeedForward(shape)

    def forward(
        self, tokens: Tensor, hidden: Tensor, offset: int, earlier: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Embeddings and hidden states [B, T, E] -> hidden states [B, T, E]."""
        raise NotImplementedError

    def advance(self, stream: Tensor, x: Tensor, offset: int, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The stream [B, T, E] and what attention reads [B, T, inputs] -> the stream."""
        stream = stream + self.self_attn(x, offset, earlier)
        out: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return out


class _EagleLayer(DraftingLayer):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape, 2 * shape.hidden_size)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, eps=EPS)

    def forward(
        self, tokens: Tensor, hidden: Tensor, offset: int, earlier: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """See DraftingLayer."""
        stream = self.hidden_norm(hidden)
        x = torch.cat((self.input_layernorm(tokens), stream), -1)
        return self.advance(stream, x, offset, earlier)


def drafted(
    layer: nn.Module, embedding: Tensor, hidden: Tensor, ids: Tensor, num_rounds: int
) -> list[Tensor]:
    """Hidden states [B, T, E] of each draft (see TrainedHead) by a layer that begins with some, and goes on
    with its own. The embedding is [rows, E].
    """
    found: list[Tensor] = []
    earlier: list[tuple[Tensor, Tensor]] = []
    for number in range(num_rounds):
        following = nn.functional.pad(ids[:, 1 + number :], (0, 1 + number))
        hidden = layer(embedding[following], hidden, number, earlier)
        found.append(hidden)
    return found


class TrainedHead(nn.Module):
    """What drafts, in training: the course and its files know no more of it."""

    # The ids that it draws [V].
    kept_ids: Tensor

    def rounds(self, states: Tensor, ids: Tensor, num_rounds: int) -> list[Tensor]:
        """What was read of the target [B, T, ...] of tokens ids [B, T] -> hidden states [B, T, E] of each
        draft: those of draft r at t say what follows token t + 1 + r.
        """
        raise NotImplementedError

    def logits(self, hidden: Tensor, number: int) -> Tensor:
        """Hidden states [R, E] of the draft of that number -> [R, V]."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """What its file holds beside its parameters."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """Its config.json."""
        raise NotImplementedError


class Head(TrainedHead):
    """One layer over three hidden states of the target; its parameters are named as their tensors."""

    def __init__(self, shape: HeadShape, embedding: Tensor, kept_ids: Tensor, *, tied: bool) -> None:
        """`embedding` [rows, E] is the target's, and stays as it is; `kept_ids` [V] are the ids that are
        drawn. `tied`: the target's logits are products with its embedding, so the head's begin as these.
        """
        super().__init__()
        self.shape = shape
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("kept_ids", kept_ids, persistent=False)
        self.fc = nn.Linear(len(shape.layers) * shape.hidden_size, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList([_EagleLayer(shape)])
        self.norm = nn.RMSNorm(shape.hidden_size, eps=EPS)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        with torch.no_grad():
            # The latest of the hidden states is the nearest to what is drawn.
            self.fc.weight[:, -shape.hidden_size :] += torch.eye(shape.hidden_size)
            if tied:
                self.lm_head.weight.copy_(embedding[kept_ids])

    def rounds(self, states: Tensor, ids: Tensor, num_rounds: int) -> list[Tensor]:
        """See TrainedHead; states [B, T, 3 E]."""
        assert isinstance(self.embedding, Tensor), "a buffer"
        return drafted(self.layers[0], self.embedding, self.fc(states), ids, num_rounds)

    def logits(self, hidden: Tensor, number: int) -> Tensor:
        """See TrainedHead; all rounds have the same."""
        out: Tensor = self.lm_head(self.norm(hidden))
        return out

    def tensors(self) -> dict[str, Tensor]:
        """See TrainedHead."""
        drawn = torch.zeros(self.shape.vocab_size, dtype=torch.bool)
        drawn[self.kept_ids] = True
        return {"d2t": self.kept_ids - torch.arange(self.kept_ids.numel()), "t2d": drawn}

    def config(self) -> dict[str, Any]:
        """See TrainedHead."""
        form = speculators_form(self.shape, "eagle3", "Eagle3Speculator", model_type="llama", num_layers=1)
        return form | {
            "draft_vocab_size": self.shape.draft_vocab_size,
            "target_hidden_size": self.shape.hidden_size,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": list(self.shape.layers),
        }


def eagle_head(target: DraftedModel, model: str, kept: Tensor, num_rounds: int) -> Head:
    """A head which draws some ids; further rounds need nothing more."""
    shape = shape_for(target, model, kept.numel())
    return Head(shape, target.embedding(), kept, tied=target.spec.tied_embeddings)


def shape_for(target: DraftedModel, model: str, num_drawn: int) -> HeadShape:
    """The sizes of the target's layers, for a head that draws so many ids."""
    spec = target.spec
    heads = spec.num_heads if spec.latent is None else max(1, spec.hidden_size // 64)
    return HeadShape(
        target=model,
        architecture=spec.architecture,
        layers=target.layers,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=heads,
        num_kv_heads=spec.num_kv_heads if spec.latent is None else heads,
        head_dim=spec.head_dim if spec.latent is None else 64,
        vocab_size=spec.num_embeddings,
        draft_vocab_size=num_drawn,
        rope_theta=spec.ropes[0].theta,
        max_positions=spec.max_positions,
    )


def write_head(head: TrainedHead, folder: Path) -> None:
    """The head's files, its configuration last."""
    weights = {name: each.to(torch.bfloat16).contiguous() for name, each in head.state_dict().items()}
    (folder / "model.safetensors").write_bytes(save(weights | head.tensors(), metadata={"format": "pt"}))
    text = json.dumps(head.config(), indent=2) + "\n"
    unfinished = folder / "config.json.new"
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(folder / "config.json")


def speculators_form(
    shape: HeadShape, algorithm: str, architecture: str, *, model_type: str, num_layers: int
) -> dict[str, Any]:
    """What configurations of the `speculators` format have in common; `model_type` is that of the layer."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": 4}
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_version": "0.3.0",
        "transformer_layer_config": {
            "model_type": model_type,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            NORM_EPS_KEY: EPS,
            "rope_theta": shape.rope_theta,
            "max_position_embeddings": shape.max_positions,
            "vocab_size": shape.vocab_size,
            "attention_bias": False,
            "mlp_bias": False,
            "torch_dtype": "bfloat16",
        },
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": shape.target, "architectures": [shape.architecture]},
        },
        "torch_dtype": "bfloat16",
    }


def kept_ids(answers: Sequence[Sequence[int]], vocab_size: int, most: int) -> Tensor:
    """The ids that answers have most often [most], in order; all where `most` is 0 or not fewer."""
    if not most or most >= vocab_size:
        return torch.arange(vocab_size)
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ids in answers:
        counts += torch.bincount(torch.tensor(ids), minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:most].sort().values
