"""Layers that a model's own checkpoint has behind its last one, and that predict further tokens (multi-token
prediction: DeepSeek-V3, arXiv 2412.19437), as heads that draft. No torch here.

    h(p) = the model's hidden state of position p behind its final norm
    x(p) = product of [norm(embedding of token p + 1), norm(h(p))]
    y(p) = norm(layer(x(p)))             a layer as the model's own, with keys and values of its own
    token p + 2 ~ the model's own head of y(p);  and y(p) is h(p + 1) of the next draft

Embedding and head are the model's, whatever copies of them the checkpoint has. Where it has several such
layers the first one makes all drafts, as with vLLM. vLLM and SGLang compute the same, but for two things of
DeepSeek's and GLM's layers: in vLLM what goes on to the next draft is not normed, which it is in SGLang and
here; and at position 0 vLLM takes the embedding for zero, as both do for MiMo's, which the paper does not.

A family says how the tensors are called (`PredictionSpec`); the engine's plan reads this, `mtp_reading` the
tensors, and `mtp_native` computes.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.model.draft_heads import KEY, check_target
from engine.model.spec import ModelSpec, TensorHeader, TensorNames
from runtime.errors import ConfigError

MTP = "mtp"
# What tensors are called here, beside those of the layer, `model.layers.0`, and of the norm behind it,
# `model.norm`.
PRODUCT, TOKEN_NORM, HIDDEN_NORM = "model.eh_proj", "model.enorm", "model.hnorm"
_FAMILIES = "of safetensors of DeepSeek-V3, GLM-4.5 and later, MiMo, Qwen3-Next and Qwen3.5 some have one"


def read_predictor_spec(target: ModelSpec, folder: Path) -> ModelSpec:
    """The head in a model's own folder: a layer as the last one that attends. Raises ConfigError where the
    model's family has none.
    """
    prediction = target.prediction
    if prediction is None or not target.attending:
        raise _none_there(target, folder)
    like, experts = target.attending[-1], target.experts
    if experts is not None:
        is_sparse = like in experts.layers
        experts = msgspec.structs.replace(experts, layers=(0,)) if is_sparse else None
    return msgspec.structs.replace(
        target,
        num_layers=1,
        rope_of_layer=(target.rope_of_layer[like],),
        windows=(target.windows[like],),
        experts=experts,
        state=None,
        attention_layers=None,
        tied_embeddings=False,
        names=TensorNames(
            renamed=(*prediction.renamed, *target.names.renamed), skipped=rf"(?!{prediction.own})"
        ),
        prediction=None,
        draft_head=prediction,
    )


def check_predictor(
    head: ModelSpec,
    headers: dict[str, TensorHeader],
    target: ModelSpec,
    config: EngineConfig,
    device: str,
    folder: Path,
) -> None:
    """Raises ConfigError where the checkpoint has no such layer, or nothing can be drafted for the model."""
    if path := config.speculation.draft_model:
        raise ConfigError(
            f"{KEY} = {path!r}: the layer that drafts by method {MTP!r} is the model's own; set it to "
            '"", or the method to what that is'
        )
    if not any(name.startswith(f"{PRODUCT}.") for name in headers):
        raise _none_there(target, folder)
    check_target(head, target, config, device)


def _none_there(target: ModelSpec, folder: Path) -> ConfigError:
    return ConfigError(
        f"engine.speculation.method = {MTP!r}: {folder} ({target.architecture}) has no layer that predicts "
        f"further tokens, or none that is read: {_FAMILIES}; set it to off, ngram, suffix or lookahead"
    )
