"""Reads adapters as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors`. No torch.

What is not a low-rank change of a linear layer is refused by the name that PEFT gives it.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.model.checkpoint import StoredTensor, read_stored
from kernels.adapters.low_rank import Change
from runtime.errors import ConfigError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])(\.[^.]+)?\.weight")
_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
# Of what PEFT writes beside A and B, what it is.
_OTHERS = {
    "lora_magnitude_vector": "magnitudes (DoRA)",
    "lora_embedding_": "an adapter of embeddings",
    "embed_tokens": "embeddings, perhaps of another vocabulary",
    "lm_head": "a head, perhaps of another vocabulary",
}
# These change the base model's own weights before training.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class AdapterError(ConfigError):
    """The adapter cannot be served; the message names it, the field at fault and the remedy."""


class PeftConfig(msgspec.Struct, frozen=True):
    """What of `adapter_config.json` decides what is computed. Other fields are about training."""

    peft_type: str = "LORA"
    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    base_model_name_or_path: str | None = None
    bias: str = "none"
    use_dora: bool = False
    lora_bias: bool = False
    init_lora_weights: Any = True
    modules_to_save: Any = None
    trainable_token_indices: Any = None
    target_parameters: Any = None
    layer_replication: Any = None
    alora_invocation_tokens: Any = None
    use_qalora: bool = False

    def unserved(self) -> str:
        """The first field whose value asks for what is not served, with the remedy; empty where none does."""
        if self.peft_type != "LORA":
            return f"peft_type = {self.peft_type!r}: LORA alone is served"
        if self.bias != "none":
            return f"bias = {self.bias!r}: biases stay the base model's; train with bias = 'none'"
        start = str(self.init_lora_weights).lower()
        if start.startswith(_CHANGES_BASE):
            return (
                f"init_lora_weights = {start!r} changes the base model; save the adapter converted to plain "
                "LoRA (path_initial_model_for_weight_conversion)"
            )
        for name, remedy in _REFUSED.items():
            value = getattr(self, name)
            if value:
                return f"{name} = {str(value)[:80]} is not served; {remedy}"
        return ""

    def scale_of(self, module: str) -> tuple[int, float]:
        """Rank of a module, and what its change is multiplied by."""
        rank = _by_pattern(self.rank_pattern, module, self.r)
        alpha = _by_pattern(self.alpha_pattern, module, self.lora_alpha)
        return rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)


_REFUSED = {
    "modules_to_save": "train without it: whole modules stay the base model's",
    "use_dora": "train with use_dora = false",
    "lora_bias": "train with lora_bias = false",
    "trainable_token_indices": "train without it: embeddings stay the base model's",
    "target_parameters": "train with target_modules: linear layers alone take adapters, experts do not",
    "layer_replication": "serve the replicated model as a checkpoint of its own",
    "alora_invocation_tokens": "train a plain LoRA, which holds from the first token",
    "use_qalora": "train with use_qalora = false",
}


def _by_pattern(patterns: Mapping[str, Any], module: str, usual: Any) -> Any:
    """The value of the first pattern that the end of a module's name matches, as PEFT looks it up."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), usual)


@dataclass(frozen=True)
class Module:
    """A linear layer that takes adapters."""

    inputs: int
    outputs: int


Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class AdapterFile:
    """An adapter that was checked, and not read yet."""

    name: str
    folder: Path
    config: PeftConfig
    # By module: where A and B are.
    tensors: Mapping[str, tuple[StoredTensor, StoredTensor]]
    # Of the files that were checked.
    stamp: Stamp

    def change_of(self, module: str) -> Change | None:
        """Reads what the adapter changes in a module; None where it leaves it alone. Raises AdapterError."""
        found = self.tensors.get(module)
        if found is None:
            return None
        _, scale = self.config.scale_of(module)
        down, up = (self._read(each, module) for each in found)
        return Change(down=down, up=np.ascontiguousarray(up * np.float32(scale)))

    def _read(self, tensor: StoredTensor, module: str) -> NDArray[np.float32]:
        begin, end = tensor.data_offsets
        path = self.folder / WEIGHTS
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                file.seek(8 + length + begin)
                raw = file.read(end - begin)
            values = np.frombuffer(raw, _DTYPES[tensor.dtype]).reshape(tensor.shape)
        except (OSError, ValueError, struct.error) as error:
            raise AdapterError(f"adapter {self.name!r}: {path}: {error}; copy and add it again") from error
        if tensor.dtype == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        read = np.array(values, np.float32)
        if not np.isfinite(read).all():
            raise AdapterError(
                f"adapter {self.name!r}: {path}: the adapter of {module} holds numbers that are not finite; "
                "train it again"
            )
        return read

    def check_unchanged(self) -> None:
        """Raises AdapterError where the files are not those that were checked."""
        if stamp_of(self.folder) != self.stamp:
            raise AdapterError(
                f"adapter {self.name!r}: {self.folder} has changed since it was added; remove the "
                "adapter and add it again"
            )


def stamp_of(folder: Path) -> Stamp:
    """What tells one version of an adapter's files from another; empty where one is missing."""
    try:
        found = [(folder / name).stat() for name in (CONFIG, WEIGHTS)]
    except OSError:
        return ()
    return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in found)


def check_adapter(name: str, folder: Path, modules: Mapping[str, Module], *, max_rank: int) -> AdapterFile:
    """Reads configuration and header of an adapter for a model of those `modules`. Raises AdapterError."""

    def refuse(problem: str) -> AdapterError:
        return AdapterError(f"adapter {name!r}: {folder}: {problem}")

    stamp = stamp_of(folder)
    if not stamp:
        raise refuse(
            f"there is no {CONFIG} beside an {WEIGHTS}; give the folder that PEFT saved, as safetensors"
        )
    try:
        config = msgspec.json.decode((folder / CONFIG).read_bytes(), type=PeftConfig)
        for key in (*config.rank_pattern, *config.alpha_pattern):
            re.compile(key)
    except (OSError, ValueError, re.error) as error:
        raise refuse(f"{CONFIG}: {error}") from error
    unserved = config.unserved()
    if unserved:
        raise refuse(f"{CONFIG}: {unserved}")
    try:
        stored = read_stored(folder / WEIGHTS)
    except ConfigError as error:
        raise AdapterError(f"adapter {name!r}: {error}") from error
    pairs = _pairs(stored, modules, refuse)
    base = config.base_model_name_or_path or "another model"
    for module, pair in pairs.items():
        _check_shapes(module, pair, modules[module], config, max_rank, base, refuse)
    return AdapterFile(
        name=name,
        folder=folder,
        config=config,
        tensors={module: (pair["A"], pair["B"]) for module, pair in pairs.items()},
        stamp=stamp,
    )


Refuse = Callable[[str], AdapterError]


def _pairs(
    stored: Mapping[str, StoredTensor], modules: Mapping[str, Module], refuse: Refuse
) -> dict[str, dict[str, StoredTensor]]:
    """A and B of each module that the adapter changes."""
    pairs: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        found = _TENSOR.fullmatch(name)
        module = found["module"] if found else ""
        if found is None or module not in modules:
            raise refuse(_why_not(name, module, modules))
        if tensor.dtype not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise refuse(f"tensor {name}: dtype = {tensor.dtype}; save it as one of {known}")
        pairs.setdefault(module, {})[found["part"]] = tensor
    if not pairs:
        raise refuse(f"{WEIGHTS} holds no tensors")
    for module, pair in pairs.items():
        if len(pair) < 2:
            missing = "B" if "A" in pair else "A"
            raise refuse(f"{module}: lora_{missing}.weight is missing; save the adapter again")
    return pairs


def _why_not(name: str, module: str, modules: Mapping[str, Module]) -> str:
    for mark, what in _OTHERS.items():
        if mark in name:
            return (
                f"tensor {name} is {what}, which is not served; train the linear layers of the decoder alone"
            )
    if ".experts." in name or module.endswith((".gate", ".router")):
        return (
            f"tensor {name}: experts and routers take no adapters; train with target_modules of attention "
            "and shared experts alone"
        )
    kinds = ", ".join(sorted({each.rpartition(".")[2] for each in modules}))
    return (
        f"tensor {name} belongs to no linear layer of this model that takes adapters ({kinds}); serve it "
        "beside the base that it was trained for"
    )


def _check_shapes(
    module: str,
    pair: Mapping[str, StoredTensor],
    served: Module,
    config: PeftConfig,
    max_rank: int,
    base: str,
    refuse: Refuse,
) -> None:
    rank, _ = config.scale_of(module)
    if rank < 1:
        raise refuse(f"{CONFIG}: r = {rank} of {module}: must be at least 1")
    for part, wanted in (("A", (rank, served.inputs)), ("B", (served.outputs, rank))):
        shape = pair[part].shape
        if shape == wanted:
            continue
        rank_differs = len(shape) == 2 and shape[part == "A"] == wanted[part == "A"]
        if rank_differs:
            why = f"{CONFIG} says r = {rank} for it; save the adapter again"
        else:
            why = f"it was trained for {base}, which is not this model; serve it beside that"
        raise refuse(
            f"{module}.lora_{part}.weight has shape {list(shape)} where {list(wanted)} is needed: {why}"
        )
    if rank > max_rank:
        raise refuse(
            f"{CONFIG}: r = {rank} of {module} exceeds engine.adapters.max_rank = {max_rank}; raise that, or "
            "train with a smaller rank"
        )
