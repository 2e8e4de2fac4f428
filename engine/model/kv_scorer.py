"""A scorer of keys and values, as KVzap has it (arXiv 2601.07891): how much each token of a prompt will be
looked at, foreseen in each layer and kv head from what its attention computes upon.

A folder holds `config.json` and `model.safetensors` as kvpress' KVzapModel writes them, so published ones
load (https://github.com/NVIDIA/kvpress): for each layer a linear map, or two with a GELU between. A score is
the logarithm of what KVzip+ would say. No torch, but for states that are its tensors.

Shape letters: T tokens, E hidden size, K kv heads.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.model.checkpoint import StoredTensor, read_stored
from engine.model.spec import CheckpointError, ModelSpec
from runtime.errors import ConfigError

# In a checkpoint's folder it is found by itself.
FOLDER = "kvzap"
_TYPES: Mapping[str, type[np.generic]] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
Values = NDArray[np.float32]


class KvScorerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`config.json`, under kvpress' names."""

    input_dim: int
    output_dim: int
    n_modules: int
    # Of maps of two layers.
    hidden_dim: int | None = None
    model_type: str = "kvzap"


@dataclass(frozen=True, kw_only=True)
class KvScorer:
    """Scores of one model's tokens. By layer the maps, one after another: weight [outputs, inputs], bias."""

    layers: Sequence[Sequence[tuple[Values, Values]]]

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""
        return sum(part.nbytes for maps in self.layers for each in maps for part in each)

    def score(self, layer: int, states: Any) -> NDArray[np.float64]:
        """Scores [K, T] of what a layer's attention computes upon [T, E], on the host or any device."""
        if isinstance(states, np.ndarray):
            found: Any = states
            for number, (weight, bias) in enumerate(self.layers[layer]):
                found = (gelu(found) if number else found) @ weight.T + bias
            return np.asarray(found.T, np.float64)
        import torch

        found = states.float()
        for number, each in enumerate(self.layers[layer]):
            moved = [torch.from_numpy(part).to(found.device) for part in each]
            found = torch.nn.functional.gelu(found) if number else found
            found = torch.nn.functional.linear(found, *moved)
        return np.asarray(found.T.double().cpu().numpy())


def gelu(x: Values) -> Values:
    """x times the normal distribution up to it; erf by Abramowitz and Stegun, 7.1.26."""
    size = np.abs(x) * np.float32(2**-0.5)
    t = np.float32(1) / (np.float32(1) + np.float32(0.3275911) * size)
    rest: Any = np.zeros_like(x)
    for factor in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        rest = (rest + np.float32(factor)) * t
    error = np.copysign(1 - rest * np.exp(-size * size), x)
    return np.asarray(np.float32(0.5) * x * (1 + error), np.float32)


def find_scorer(
    configured: str, checkpoint: Path, spec: ModelSpec, remembers_because: str
) -> KvScorer | None:
    """The configured one (`engine.cache.kvzap`), or that in the model's folder; None where there is neither.
    Raises ConfigError for one that is not of this model, or of one whose answers can forget nothing, because
    of what is given.
    """
    found = _described(configured, checkpoint, spec, remembers_because)
    if found is None:
        return None
    folder, config, stored = found
    layers = _read(folder / "model.safetensors", stored, config, _key(folder))
    return KvScorer(layers=layers)


def scorer_bytes(configured: str, checkpoint: Path, spec: ModelSpec, remembers_because: str) -> int:
    """What `find_scorer` will take in memory, from descriptions alone; raises as it does."""
    found = _described(configured, checkpoint, spec, remembers_because)
    if found is None:
        return 0
    _, config, _ = found
    shapes = (shape for layer in range(config.n_modules) for _, shape in names_of(config, layer))
    return sum(4 * outputs * (inputs + 1) for outputs, inputs in shapes)


def _key(folder: Path) -> str:
    return f"engine.cache.kvzap = {str(folder)!r}"


def _described(
    configured: str, checkpoint: Path, spec: ModelSpec, remembers_because: str
) -> tuple[Path, KvScorerConfig, Mapping[str, StoredTensor]] | None:
    """Where the scorer lies, and what it says of itself."""
    folder = Path(configured) if configured else checkpoint / FOLDER
    if not configured and (remembers_because or not (folder / "config.json").is_file()):
        return None
    key = _key(folder)
    without = "set it to ''" if configured else "take the folder away"
    if remembers_because:
        raise ConfigError(f"{key}: no answer of this model may forget: {remembers_because}; {without}")
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=KvScorerConfig)
        stored = read_stored(folder / "model.safetensors")
    except (OSError, msgspec.DecodeError, CheckpointError) as error:
        raise ConfigError(
            f"{key}: {error}; name a folder that millrace train-kvzap wrote, or a KVzapModel of kvpress"
        ) from error
    if problem := _problem_with(config, spec):
        raise ConfigError(f"{key}: {problem}; train one for this model (millrace train-kvzap), or {without}")
    return folder, config, stored


def unscored_because(scorer: KvScorer | None) -> str:
    """Why nobody can ask for kvzap; empty where they can."""
    if scorer is not None:
        return ""
    return "the engine has no scorer of this model (engine.cache.kvzap; millrace train-kvzap makes one)"


def _problem_with(config: KvScorerConfig, spec: ModelSpec) -> str:
    """Why a scorer is none of this model; empty where it is."""
    if config.model_type != "kvzap":
        return f"its model_type is {config.model_type!r}, not 'kvzap'"
    wanted = config_of(spec)
    for name, what in (("n_modules", "layers"), ("input_dim", "hidden elements"), ("output_dim", "kv heads")):
        ours, theirs = getattr(wanted, name), getattr(config, name)
        if theirs != ours:
            return f"its {name} is {theirs}, and {spec.architecture} has {ours} {what}"
    return ""


def config_of(spec: ModelSpec) -> KvScorerConfig:
    """Of the linear scorer of a model. Raises ConfigError for layers that differ in their kv heads."""
    heads = {spec.heads_of(layer).num_kv_heads for layer in spec.attending}
    if len(heads) > 1:
        found = f"{min(heads)} to {max(heads)} kv heads, and a scorer the same number for all"
        raise ConfigError(f"layers of {spec.architecture} have {found}; set engine.cache.kvzap to ''")
    return KvScorerConfig(
        input_dim=spec.hidden_size, output_dim=max(heads, default=0), n_modules=spec.num_layers
    )


def names_of(config: KvScorerConfig, layer: int) -> list[tuple[str, tuple[int, int]]]:
    """The maps of a layer: beginnings of names, and shapes [outputs, inputs]."""
    if config.hidden_dim is None:
        return [(f"layers.{layer}", (config.output_dim, config.input_dim))]
    inner = config.hidden_dim
    return [
        (f"layers.{layer}.0", (inner, config.input_dim)),
        (f"layers.{layer}.2", (config.output_dim, inner)),
    ]


def _read(
    path: Path, stored: Mapping[str, StoredTensor], config: KvScorerConfig, key: str
) -> list[list[tuple[Values, Values]]]:
    raw = np.fromfile(path, np.uint8)
    (length,) = struct.unpack("<Q", raw[:8].tobytes())
    data = raw[8 + length :]

    def take(name: str, shape: tuple[int, ...]) -> Values:
        tensor = stored.get(name)
        if tensor is None or tensor.shape != shape or tensor.dtype not in _TYPES:
            found = "missing" if tensor is None else f"{tensor.dtype} of shape {list(tensor.shape)}"
            wanted = f"{' or '.join(_TYPES)} of shape {list(shape)}"
            raise ConfigError(f"{key}: tensor {name} is {found}, not {wanted}; copy or train it again")
        begin, end = tensor.data_offsets
        values = data[begin:end].view(_TYPES[tensor.dtype]).reshape(shape)
        if tensor.dtype == "BF16":
            values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        values = np.ascontiguousarray(values, np.float32)
        if not np.isfinite(values).all():
            raise ConfigError(f"{key}: tensor {name} is not finite; copy or train it again")
        return values

    return [
        [
            (take(f"{name}.weight", shape), take(f"{name}.bias", shape[:1]))
            for name, shape in names_of(config, layer)
        ]
        for layer in range(config.n_modules)
    ]
