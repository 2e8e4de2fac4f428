"""Checkpoints with a layer that predicts further tokens, as their trainers name it, and what it computes by
the published formula in torch: a layer of transformers' own, with all around it written here.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine.speculation_config import SpeculationConfig
from tests.unit.engine.checkpoints import SMALL, edit_config, make_checkpoint


@dataclass(frozen=True)
class Naming:
    """What tensors are called: those of the layer begin with `layer`. `{}` is the number of others."""

    layer: str
    token_norm: str
    hidden_norm: str
    product: str
    norm: str
    hidden_first: bool = False
    # What comes with them and is not read: copies of the model's own, and a second layer's.
    unread: tuple[str, ...] = ()


_BEHIND = Naming(
    layer="model.layers.{}.",
    token_norm="model.layers.{}.enorm",
    hidden_norm="model.layers.{}.hnorm",
    product="model.layers.{}.eh_proj",
    norm="model.layers.{}.shared_head.norm",
    unread=("model.layers.{}.embed_tokens.weight", "model.layers.{}.shared_head.head.weight"),
)
_MIMO = Naming(
    layer="model.mtp_layers.0.",
    token_norm="model.mtp_layers.0.token_layernorm",
    hidden_norm="model.mtp_layers.0.hidden_layernorm",
    product="model.mtp_layers.0.input_proj",
    norm="model.mtp_layers.0.final_layernorm",
    hidden_first=True,
    unread=("model.mtp_layers.1.self_attn.o_proj.weight",),
)
_QWEN = Naming(
    layer="mtp.layers.0.",
    token_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    product="mtp.fc",
    norm="mtp.norm",
)
_NAMINGS = {"qwen2": _MIMO, "deepseek_v3": _BEHIND, "glm4_moe": _BEHIND, "glm4_moe_lite": _BEHIND}


@dataclass
class Predicting:
    """A model, and its layer that predicts."""

    model: transformers.PreTrainedModel
    # Transformers' body of that layer alone, with the norm behind it.
    body: nn.Module
    token_norm: nn.Module
    hidden_norm: nn.Module
    product: Tensor  # [E, 2 E], the embedding's half first

    def drafts(self, ids: list[int], num_drafts: int) -> list[Tensor]:
        """Logits [V] of so many drafts behind the last of `ids`, of which each takes the likeliest before."""
        model: Any = self.model
        with torch.no_grad():
            hidden = model.model(torch.tensor([ids[:-1]])).last_hidden_state[0]
            known, found = list(ids), []
            for _ in range(num_drafts):
                embedded = model.model.embed_tokens(torch.tensor(known[1:]))
                joined = torch.cat((self.token_norm(embedded), self.hidden_norm(hidden)), dim=-1)
                left = self.body(
                    inputs_embeds=(joined @ self.product.T)[None], use_cache=False
                ).last_hidden_state[0]
                found.append(model.lm_head(left[-1]))
                known.append(int(found[-1].argmax()))
                hidden = torch.cat((hidden, left[-1:]))
        return found


def make_predicting(
    folder: Path, model_type: str, *, echo: float | None = None, **changes: Any
) -> Predicting:
    """Writes a random checkpoint that has such a layer. With `echo` layers add that much of what they would,
    so that both draw by a token's embedding in the main, and the layer is right the more often the less it
    is.
    """
    count = changes.get("num_hidden_layers", SMALL["num_hidden_layers"])
    kinds = {key: [*changes[key], changes[key][-1]] for key in ("mlp_layer_types",) if key in changes}
    if "layer_types" in changes:
        kinds["layer_types"] = [*changes["layer_types"], "full_attention"]
    model: Any = make_checkpoint(folder, model_type, **changes | kinds | {"num_hidden_layers": count + 1})
    size = model.config.hidden_size
    product, norms = torch.randn(size, 2 * size) * 0.15, [copy.deepcopy(model.model.norm) for _ in range(3)]
    with torch.no_grad():
        for norm in norms:
            norm.weight.add_(torch.randn(size) * 0.1)
        if echo is not None:
            _tame(model, echo)
            product, norms = torch.eye(size, 2 * size), [copy.deepcopy(model.model.norm) for _ in range(3)]
            # Qwen3-Next's and later norms are stored as their distance from one.
            norms[0].weight.fill_(0.0 if model_type.startswith("qwen3") else 1.0)
    model.save_pretrained(folder)
    body = copy.deepcopy(model.model)
    body.layers, body.norm = nn.ModuleList([body.layers[-1]]), norms[2]
    body.config.num_hidden_layers, body.config.layer_types = 1, ["full_attention"]
    model.config.num_hidden_layers = count
    _write(folder, model_type, count, product, norms)
    return Predicting(model, body, norms[0], norms[1], product)


def _tame(model: nn.Module, echo: float) -> None:
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[0].endswith(("o_proj", "down_proj", "out_proj", "experts")):
            parameter.mul_(echo)


def _write(folder: Path, model_type: str, count: int, product: Tensor, norms: list[Any]) -> None:
    naming, path = _NAMINGS.get(model_type, _QWEN), folder / "model.safetensors"
    front = f"model.layers.{count}."
    tensors = {
        name.replace(front, naming.layer.format(count)): each for name, each in load_file(path).items()
    }
    tensors |= {name.format(count): torch.full((3, 2), torch.nan) for name in naming.unread}
    names = (naming.token_norm, naming.hidden_norm, naming.norm)
    for name, norm in zip(names, norms, strict=True):
        tensors[f"{name.format(count)}.weight"] = norm.weight.detach().clone()
    halves = product.chunk(2, dim=1)
    stored = torch.cat(halves[::-1] if naming.hidden_first else halves, dim=1)
    tensors[f"{naming.product.format(count)}.weight"] = stored.contiguous()
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    lists = {key: config[key][:count] for key in ("layer_types", "mlp_layer_types") if config.get(key)}
    mimo = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"} if naming is _MIMO else {}
    edit_config(folder, num_hidden_layers=count, num_nextn_predict_layers=1, **lists, **mimo)


def predicting_speculation(**changes: Any) -> SpeculationConfig:
    """Drafts by that layer whether they pay or not."""
    return SpeculationConfig(method="mtp", **{"min_acceptance": 0.0} | changes)
