"""What heads that draft have in common: the models that they go with. No torch.

The engine's plan and the training of heads ask here; `eagle3`, `medusa` and `mtp` say what a head of each
kind is.
"""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig
from engine.model.layer_spec import PredictionSpec
from engine.model.spec import ModelSpec
from runtime.errors import ConfigError

KEY = "engine.speculation.draft_model"
REMEDY = "take the head that was trained with this model, or train one (millrace train-drafter)"
FLOAT_BYTES = 4


def why_no_head(target: ModelSpec, *, is_own: bool = False) -> str:
    """Why nothing can be drafted from a model's hidden states; empty where it can. `is_own`: by a layer of
    its own checkpoint, which was trained with states where there are such.
    """
    for is_so, why in (
        (
            target.state is not None and not is_own,
            "has layers that carry a state, which no head's drafts go back behind",
        ),
        (target.pooling is not None, "pools what it reads, and draws no tokens"),
        (target.altup is not None, "has several streams"),
    ):
        if is_so:
            return why
    return ""


def is_own_layer(head: ModelSpec) -> bool:
    """Whether what drafts is a layer of the model's own checkpoint."""
    return isinstance(head.draft_head, PredictionSpec) and head.draft_head.is_own


def draft_config(config: EngineConfig, draft: ModelSpec) -> EngineConfig:
    """By what the weights of what drafts are read: as they are stored, since they are few; but a layer of the
    model's own checkpoint, which may have all its experts, as the model, only that no run finds ranges of its
    inputs.
    """
    replace = msgspec.structs.replace
    if is_own_layer(draft):
        return replace(config, quantization=replace(config.quantization, smoothing="off"))
    return replace(config, quantize="off")


def check_target(head: ModelSpec, target: ModelSpec, config: EngineConfig, device: str) -> None:
    """Raises ConfigError where there are no heads, or for one of another model's sizes."""
    method = f"engine.speculation.method = {config.speculation.method!r}"
    if device != "cpu":
        raise ConfigError(
            f"{method}: hidden states are captured on CPUs alone, and the steps of {device} are recorded "
            "without them; set it to ngram, suffix or draft_model, or engine.device to cpu"
        )
    if because := why_no_head(target, is_own=is_own_layer(head)):
        raise ConfigError(f"{method}: {target.architecture} {because}; set it to off")
    spec, given = head.draft_head, f"{KEY} = {config.speculation.draft_model!r}"
    assert spec is not None, "read as a head"
    if spec.target_size != target.hidden_size:
        raise ConfigError(
            f"{given} reads hidden states of {spec.target_size} elements, but the model's have "
            f"{target.hidden_size}; {REMEDY}"
        )
    if head.num_embeddings != target.num_embeddings:
        raise ConfigError(
            f"{given} is for a vocabulary of {head.num_embeddings} tokens, but the model's has "
            f"{target.num_embeddings}; {REMEDY}"
        )
