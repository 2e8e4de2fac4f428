"""What stands behind the pooling: the Dense modules of sentence-transformers, and classifiers' heads.

They are small products over one row a text, so they are float32 arrays wherever the model is computed.

Shape letters: S texts, E hidden size, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.model.records import Floats, Norm, PooledHead
from engine.model.spec import CheckpointError, ModelSpec


def read_heads(weights: Any, spec: ModelSpec) -> list[PooledHead]:
    """The heads of a checkpoint's model, first to last; `weights` is its WeightReader. Raises
    CheckpointError.
    """
    pooling = spec.pooling
    if pooling is None:
        return []
    if pooling.classifies:
        return _classifier(weights, spec, len(pooling.asked.labels))
    return [
        _read_module(weights.folder / dense.folder, dense.outputs, dense.inputs, dense.bias, dense.activation)
        for dense in pooling.dense
    ]


def _classifier(weights: Any, spec: ModelSpec, num_labels: int) -> list[PooledHead]:
    size = spec.hidden_size
    square, last = (size, size), (num_labels, size)
    if spec.classifier == "bert":
        return [_read(weights, "pooler.dense", square, "tanh"), _read(weights, "classifier", last)]
    if spec.classifier == "roberta":
        return [
            _read(weights, "classifier.dense", square, "tanh"),
            _read(weights, "classifier.out_proj", last),
        ]
    if spec.classifier == "modernbert":
        inner = _read(weights, "head.dense", square, "gelu")
        inner.norm = Norm(
            weight=_floats(weights, "head.norm.weight", (size,)), eps=spec.norm_eps, centered=True
        )
        return [inner, _read(weights, "classifier", last)]
    return [_read(weights, "score", last)]


def _read(weights: Any, name: str, shape: tuple[int, int], activation: str = "none") -> PooledHead:
    bias = _floats(weights, f"{name}.bias", shape[:1]) if weights.has(f"{name}.bias") else None
    return PooledHead(weight=_floats(weights, f"{name}.weight", shape), bias=bias, activation=activation)


def _floats(weights: Any, name: str, shape: tuple[int, ...]) -> Any:
    import torch

    return weights.keep(name, shape, dtype=torch.float32)


def _read_module(folder: Any, outputs: int, inputs: int, bias: bool, activation: str) -> PooledHead:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = folder / "model.safetensors"
    try:
        found = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; save the module as safetensors") from error
    shapes = {"linear.weight": (outputs, inputs)} | ({"linear.bias": (outputs,)} if bias else {})
    told = {name: tuple(tensor.shape) for name, tensor in found.items()}
    if told != shapes:
        raise CheckpointError(f"{file} holds {told}, but its config.json implies {shapes}")
    values = {name: tensor.to(torch.float32) for name, tensor in found.items()}
    return PooledHead(weight=values["linear.weight"], bias=values.get("linear.bias"), activation=activation)


# Computing.


def _gelu(x: Floats) -> Floats:
    from math import erf

    return np.asarray(0.5 * x * (1.0 + np.vectorize(erf, otypes=[np.float64])(x / np.sqrt(2.0))), np.float32)


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(1.0 / (1.0 + np.exp(-x.astype(np.float64))), np.float32)


def _softmax(x: Floats) -> Floats:
    weights = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True), np.float32)


ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "none": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0.0),
    "gelu": _gelu,
    "sigmoid": _sigmoid,
    "softmax": _softmax,
}


def apply_heads(heads: list[PooledHead], x: Floats) -> Floats:
    """Pooled rows x [S, E] -> [S, O]."""
    for head in heads:
        x = x @ np.asarray(head.weight).T
        if head.bias is not None:
            x = x + np.asarray(head.bias)
        x = ACTIVATIONS[head.activation](x)
        if head.norm is not None:
            centred = x - x.mean(-1, keepdims=True)
            scale = 1.0 / np.sqrt((centred * centred).mean(-1, keepdims=True) + head.norm.eps)
            x = np.asarray(centred * scale * np.asarray(head.norm.weight), np.float32)
    return x


def normalized(x: Floats) -> Floats:
    """Rows [S, O] of length one; a row of zeros stays."""
    length: NDArray[np.float32] = np.sqrt((x * x).sum(-1, keepdims=True))
    return np.asarray(x / np.maximum(length, 1e-12), np.float32)
