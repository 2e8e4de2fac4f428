"""Layers that predict further tokens (multi-token prediction: DeepSeek-V3, arXiv 2412.19437), as heads that
draft: those that a model's own checkpoint has behind its last one, or one that was trained for a model later
(services/drafter) and has a checkpoint of its own. No torch here.

    h(p) = the model's hidden state of position p behind its final norm
    x(p) = product of [norm(embedding of token p + 1), norm(h(p))]
    y(p) = norm(layer(x(p)))             a layer as the model's own, with keys and values of its own
    token p + 2 ~ the model's own head of y(p);  and y(p) is h(p + 1) of the next draft

Embedding and head are the model's, whatever copies of them a checkpoint has. Where it has several such layers
the first one makes all drafts, as with vLLM. vLLM and SGLang compute the same, but for two things of
DeepSeek's and GLM's layers: in vLLM what goes on to the next draft is not normed, which it is in SGLang and
here; and at position 0 vLLM takes the embedding for zero, as both do for MiMo's, which the paper does not.

A family says how the tensors are called (`PredictionSpec`), and a checkpoint of its own is in the
`speculators` format. The engine's plan reads this, `mtp_reading` the tensors, and `mtp_native` computes.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.model.config_reader import ConfigReader
from engine.model.draft_heads import KEY, check_target
from engine.model.families import qwen3
from engine.model.layer_spec import PredictionSpec, prediction_names
from engine.model.spec import CheckpointError, ModelSpec, TensorHeader, TensorNames
from runtime.errors import ConfigError

MTP = "mtp"
# What tensors are called here, beside those of the layer, `model.layers.0`, and of the norm behind it,
# `model.norm`.
PRODUCT, TOKEN_NORM, HIDDEN_NORM = "model.eh_proj", "model.enorm", "model.hnorm"
_FAMILIES = "of safetensors of DeepSeek-V3, GLM-4.5 and later, MiMo, Qwen3-Next and Qwen3.5 some have one"
_REMEDY = f"name a head that was trained for the model (millrace train-drafter --method {MTP}) in {KEY}"


def read_predictor_spec(target: ModelSpec) -> ModelSpec:
    """The head in a model's own folder: a layer as the last one that attends. Raises ConfigError where the
    model's family has none.
    """
    if target.prediction is None or not target.attending:
        raise _none_there(target.architecture)
    return _one_layer(target, target.prediction)


def read_trained_predictor(folder: Path) -> ModelSpec:
    """The head in a checkpoint of its own. Raises CheckpointError naming what is not a head of this kind."""
    reader = ConfigReader.of(folder)
    values = reader.values.get("transformer_layer_config")
    if reader.values.get("speculators_model_type") != MTP or not isinstance(values, dict):
        raise CheckpointError(
            f"{reader.source} describes no layer that predicts further tokens: speculators_model_type is not "
            f"{MTP!r}, or transformer_layer_config is missing; {_REMEDY}, or leave {KEY} empty where the "
            "model's own checkpoint has such a layer"
        )
    reader.require("num_nextn_predict_layers", 1, 1)
    layer = ConfigReader(values, f"{reader.source}: transformer_layer_config")
    layer.require("model_type", "qwen3", "qwen3")
    spec = msgspec.structs.replace(qwen3.read(layer), architecture="MTP")
    own = r"mtp_layers\.0\."
    return _one_layer(
        spec,
        PredictionSpec(target_size=spec.hidden_size, own=own, renamed=prediction_names(own), is_own=False),
    )


def _one_layer(like: ModelSpec, prediction: PredictionSpec) -> ModelSpec:
    """A head whose layer is as the last one of a model that attends."""
    last, experts = like.attending[-1], like.experts
    if experts is not None:
        is_sparse = last in experts.layers
        experts = msgspec.structs.replace(experts, layers=(0,)) if is_sparse else None
    return msgspec.structs.replace(
        like,
        num_layers=1,
        rope_of_layer=(like.rope_of_layer[last],),
        windows=(like.windows[last],),
        experts=experts,
        state=None,
        attention_layers=None,
        tied_embeddings=False,
        names=TensorNames(
            renamed=(*prediction.renamed, *like.names.renamed), skipped=rf"(?!{prediction.own})"
        ),
        prediction=None,
        draft_head=prediction,
    )


def check_predictor(
    head: ModelSpec, headers: dict[str, TensorHeader], target: ModelSpec, config: EngineConfig, device: str
) -> None:
    """Raises ConfigError where a checkpoint has no such layer, or it does not go with a model."""
    if not any(name.startswith(f"{PRODUCT}.") for name in headers):
        raise _none_there(config.speculation.draft_model or target.architecture)
    check_target(head, target, config, device)


def _none_there(where: str) -> ConfigError:
    return ConfigError(
        f"engine.speculation.method = {MTP!r}: {where} has no layer that predicts further tokens, or none "
        f"that is read: {_FAMILIES}; {_REMEDY}, or set the method to off, ngram, suffix or lookahead"
    )
