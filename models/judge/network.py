"""The judge: a decoder with a head of one label, in the form that every classifier has on disk.

`Qwen3ForSequenceClassification` reads a question and the steps so far as the chat they are, and the logit at
the last token says how likely all of these steps are right. The pair is joined by the tokenizer's own
template, so that whoever serves the folder needs to know nothing of it.

Its first layers are the draft model's, and learn to predict what is right. The layers on top need what these
expect: a token is compared with it in one layer, and what was found is gathered in the next.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from models.architecture import END_OF_TEXT_ID, SHAPES, Shape, model_config
from models.chat_format import IM_END, IM_START
from models.tokenizer import load_tokenizer, tokenizer_config

LABEL = "right"
NUM_PREDICTING = SHAPES["draft"].layers
SHAPE = replace(SHAPES["draft"], layers=NUM_PREDICTING + 2)
_BEFORE, _BETWEEN = f"{IM_START}user\n", f"{IM_END}\n{IM_START}assistant\n"


def judging_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a chat model, which writes a question and an answer as its chat template does."""
    tokenizer = load_tokenizer(folder)
    around = []
    for name, text in (("<before>", _BEFORE), ("<between>", _BETWEEN)):
        found = tokenizer.encode(text, add_special_tokens=False)
        around.append({"id": name, "ids": found.ids, "tokens": found.tokens})
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<before> $A <between>", pair="<before> $A <between> $B:1", special_tokens=around
    )
    return tokenizer


class StepJudge(nn.Module):
    """The network, whose parameters are float32."""

    def __init__(self, shape: Shape = SHAPE) -> None:
        super().__init__()
        self.shape = shape
        self.network = Qwen3ForSequenceClassification(Qwen3Config(**judge_config(shape))).float()

    def begin_from(self, folder: Path) -> None:
        """Takes over an exported judge, or the layers of a chat model of the same width: those on top change
        nothing then, and the head knows nothing of what is right.
        """
        weights = _weights_of(folder)
        _, unknown = self.network.load_state_dict(weights, strict=False)
        assert not unknown, "a judge has all that a chat model has"
        if "score.weight" in weights:
            return
        for layer in self.network.model.layers[NUM_PREDICTING:]:
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)
        nn.init.zeros_(self.network.score.weight)

    def forward(self, ids: Tensor, selected: Tensor) -> Tensor:
        """Logits [N] at the N flat positions `selected` of ids [B, T], padded at their ends."""
        return self.judged(ids, selected)[0]

    def judged(self, ids: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [N] behind all layers, and behind the one that compares."""
        found = self.network.model(input_ids=ids, use_cache=False, output_hidden_states=True)
        compared = self.network.model.norm(found.hidden_states[NUM_PREDICTING + 1])
        last, inner = (
            self.network.score(states.flatten(0, 1).index_select(0, selected)).squeeze(-1)
            for states in (found.last_hidden_state, compared)
        )
        return last, inner

    def predicted(self, ids: Tensor, selected: Tensor) -> Tensor:
        """Logits [N, V] of the tokens at the N flat positions `selected`, by the first layers alone."""
        states = self.network.model.embed_tokens(ids)
        places = torch.arange(ids.shape[1])[None]
        rotary = self.network.model.rotary_emb(states, places)
        for layer in self.network.model.layers[:NUM_PREDICTING]:
            states = layer(states, attention_mask=None, position_ids=places, position_embeddings=rotary)
        hidden = self.network.model.norm(states).flatten(0, 1).index_select(0, selected - 1)
        # The chat model's head is its embedding.
        logits: Tensor = hidden @ self.network.model.embed_tokens.weight.T
        return logits

    def keep_predicting(self) -> None:
        """From now on only the layers on top learn."""
        self.network.model.embed_tokens.requires_grad_(False)
        self.network.model.layers[:NUM_PREDICTING].requires_grad_(False)


def judge_config(shape: Shape) -> dict[str, Any]:
    """`config.json` of a judge of a chat model's shape."""
    return {
        **model_config(shape),
        "architectures": ["Qwen3ForSequenceClassification"],
        "id2label": {"0": LABEL},
        "label2id": {LABEL: 0},
        "pad_token_id": END_OF_TEXT_ID,
    }


def export_judge(judge: StepJudge, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes weights (bfloat16), configuration and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.to(torch.bfloat16).contiguous() for name, value in judge.network.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (
        ("config", judge_config(judge.shape)),
        ("tokenizer_config", tokenizer_config()),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def open_judge(folder: Path) -> StepJudge:
    """An exported judge, in float32."""
    judge = StepJudge()
    judge.network.load_state_dict(_weights_of(folder))
    return judge.eval()


def _weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Ids [B, T] of texts side by side, with ends of text behind the shorter ones."""
    length = max(map(len, rows))
    return torch.tensor([[*row, *[END_OF_TEXT_ID] * (length - len(row))] for row in rows])


def scores(judge: StepJudge, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """How likely all steps are right, from 0 to 1, for pairs of a question and the steps so far."""
    found: list[float] = []
    for start in range(0, len(pairs), 256):
        rows = [each.ids for each in tokenizer.encode_batch(list(pairs[start : start + 256]))]
        ids = padded(rows)
        last = torch.tensor([place * ids.shape[1] + len(row) - 1 for place, row in enumerate(rows)])
        with torch.no_grad():
            found += judge(ids, last).sigmoid().tolist()
    return found
