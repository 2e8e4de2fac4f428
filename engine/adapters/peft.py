"""Reads adapters as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors`. No torch.

What is not a low-rank change of a linear layer is refused by the name that PEFT gives it, and what can never
be computed with, such as numbers that are not finite, when the adapter is added. `read_adapter` is for every
make of engine, `check_adapter` for ours.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.adapters.version import CONFIG, WEIGHTS, AdapterError, Stamp, stamp_of, version_of
from engine.model.checkpoint import StoredTensor, read_stored
from engine.model.records import LinearCut
from kernels.adapters.low_rank import LowRankChange
from runtime.errors import ConfigError

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])(\.[^.]+)?\.weight")
_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
# Tensors that PEFT writes beside A and B, by a part of their names; none of them is applied here.
_OTHERS = {
    "lora_magnitude_vector": "magnitudes (DoRA)",
    "lora_embedding_": "an adapter of embeddings",
    "embed_tokens": "embeddings, perhaps of another vocabulary",
    "lm_head": "a head, perhaps of another vocabulary",
}
# These change the base model's own weights before training.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


WHOLE_PART = slice(None)
# Where the number of a layer stands in a module's name.
_LAYER = re.compile(r"(?:.*\.)?[^.]*\.(\d+)\.")


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
    # Modules that were trained: names, or the ends of names, of modules; or a pattern of whole names.
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    layers_to_transform: int | list[int] | None = None

    def unserved(self) -> str:
        """The first field whose value asks for what is not served, with the remedy; empty where none does."""
        if self.peft_type != "LORA":
            return f"peft_type = {self.peft_type!r}: LORA alone is served"
        for name, value in (
            ("r", self.r),
            *((f"rank_pattern.{key}", r) for key, r in self.rank_pattern.items()),
        ):
            if value < 1:
                return f"{name} = {value}: must be at least 1; save the adapter again"
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

    def targets(self, module: str) -> bool:
        """Whether a module was trained, as PEFT reads it; every one where that is not said."""
        layers = self.layers_to_transform
        # An empty list is none to PEFT.
        if layers is not None and layers != []:
            found = _LAYER.match(module)
            if not found or int(found[1]) not in ([layers] if isinstance(layers, int) else layers):
                return False
        if self.exclude_modules and _names(self.exclude_modules, module):
            return False
        return self.target_modules in (None, "all-linear") or _names(self.target_modules, module)

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


def _names(chosen: str | Collection[str] | None, module: str) -> bool:
    """Whether a module is among those chosen: by a pattern of its whole name, or by the ends of names."""
    if isinstance(chosen, str):
        return re.fullmatch(chosen, module) is not None
    return any(f".{module}".endswith(f".{each}") for each in chosen or ())


def _by_pattern(patterns: Mapping[str, Any], module: str, usual: Any) -> Any:
    """The value of the first pattern that the end of a module's name matches, as PEFT looks it up."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), usual)


@dataclass(frozen=True)
class Module:
    """A linear layer that takes adapters; all of it, wherever several ranks have parts."""

    inputs: int
    outputs: int


@dataclass(frozen=True)
class AdapterFile:
    """An adapter that was checked, and is not in memory."""

    folder: Path
    config: PeftConfig
    # By module: where A and B are.
    tensors: Mapping[str, tuple[StoredTensor, StoredTensor]]
    version: str
    # Size and time of the files when this version was read.
    stamp: Stamp

    def change_of(self, module: str, cut: LinearCut | None = None) -> LowRankChange | None:
        """Reads what the adapter changes in a module, or in a rank's part of it; None where it leaves it
        alone. Raises AdapterError.
        """
        found = self.tensors.get(module)
        if found is None:
            return None
        _, scale = self.config.scale_of(module)
        runs = [WHOLE_PART] if cut is None else [slice(begin, end) for begin, end in cut.runs]
        rows, columns = (runs, [WHOLE_PART]) if cut is None or cut.axis == 0 else ([WHOLE_PART], runs)
        down = np.concatenate([self._read(found[0], WHOLE_PART, run) for run in columns], axis=1)
        up = np.concatenate([self._read(found[1], run, WHOLE_PART) for run in rows])
        with np.errstate(over="ignore", invalid="ignore"):
            up = np.ascontiguousarray(up * np.float32(scale))
        for part, values in (("A", down), ("B", up)):
            if not np.isfinite(values).all():
                raise AdapterError(
                    f"{self.folder / WEIGHTS}: {module}.lora_{part}.weight holds numbers that are not finite"
                    f", or not when they are multiplied by lora_alpha = {self.config.lora_alpha:g} over the "
                    "rank; train the adapter again"
                )
        # Of inputs of magnitude one: what is beyond all numbers for them is so for every request.
        with np.errstate(over="ignore", invalid="ignore"):
            reach = np.abs(up) @ np.abs(down).sum(axis=1)
        if not np.isfinite(reach).all():
            raise AdapterError(
                f"{self.folder / WEIGHTS}: {module}.lora_A.weight and lora_B.weight multiply to numbers that "
                "are not finite; train the adapter again"
            )
        return LowRankChange(down=down, up=up)

    def _read(self, tensor: StoredTensor, rows: slice, columns: slice) -> NDArray[np.float32]:
        """Those rows and columns of a tensor: no others are read."""
        path, kind = self.folder / WEIGHTS, _DTYPES[tensor.dtype]
        width = tensor.shape[1]
        first, end, _ = rows.indices(tensor.shape[0])
        left, right, _ = columns.indices(width)
        # Rows that are read whole lie one behind the other.
        runs = [(first * width, end * width)]
        if right - left < width:
            runs = [(row * width + left, row * width + right) for row in range(first, end)]
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                raw = bytearray()
                for begin, behind in runs:
                    file.seek(8 + length + tensor.data_offsets[0] + begin * kind.itemsize)
                    raw += file.read((behind - begin) * kind.itemsize)
            values = np.frombuffer(raw, kind).reshape(end - first, right - left)
        except (OSError, ValueError, struct.error) as error:
            raise AdapterError(f"{path}: {error}; copy it and add the adapter again") from error
        if tensor.dtype == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return np.array(values, np.float32)

    def check_unchanged(self) -> None:
        """Raises AdapterError where the files are of another version, or gone."""
        why = ""
        try:
            if stamp_of(self.folder) == self.stamp or version_of(self.folder) == self.version:
                return
        except (AdapterError, OSError) as error:
            why = f" ({error})"
        raise AdapterError(
            f"{self.folder} has changed since the adapter was added{why}; add it again, from files that stay"
        )


def read_adapter(folder: Path) -> AdapterFile:
    """An adapter that does not contradict itself, and whose numbers are all finite. Raises AdapterError."""
    version = version_of(folder)
    try:
        stamp = stamp_of(folder)
        config = msgspec.json.decode((folder / CONFIG).read_bytes(), type=PeftConfig)
        config.targets("")
        for key in (*config.rank_pattern, *config.alpha_pattern):
            re.compile(key)
    except (OSError, ValueError, RecursionError, re.error) as error:
        raise AdapterError(f"{folder / CONFIG}: {error}; save the adapter again") from error
    if unserved := config.unserved():
        raise AdapterError(f"{folder / CONFIG}: {unserved}")
    try:
        stored = read_stored(folder / WEIGHTS)
    except ConfigError as error:
        raise AdapterError(str(error)) from error
    with _about(folder):
        tensors = _pairs(stored, config)
    file = AdapterFile(folder, config, tensors, version, stamp)
    for module in tensors:
        file.change_of(module)
    file.check_unchanged()
    return file


@contextmanager
def _about(folder: Path) -> Iterator[None]:
    try:
        yield
    except AdapterError as error:
        raise AdapterError(f"{folder}: {error}") from error


def check_adapter(folder: Path, modules: Mapping[str, Module], *, max_rank: int) -> AdapterFile:
    """`read_adapter` for a model of those `modules`: it fits them, and leaves out none that it says to have
    trained. Raises AdapterError.
    """
    file = read_adapter(folder)
    with _about(folder):
        for module, pair in file.tensors.items():
            if module not in modules:
                raise AdapterError(_why_not(module, modules))
            _check_shapes(module, pair, modules[module], file.config, max_rank)
        lacking = next((each for each in _trained(file, modules) if each not in file.tensors), None)
        if lacking:
            raise AdapterError(
                f"{WEIGHTS} has no tensors of {lacking}, which {CONFIG} says was trained (target_modules = "
                f"{_short(file.config.target_modules)}); save the adapter again"
            )
    return file


def _trained(file: AdapterFile, modules: Mapping[str, Module]) -> list[str]:
    """Modules of the model that the adapter should have. Where its configuration does not name any, those of
    the kinds that it has.
    """
    kinds = {each.rpartition(".")[2] for each in file.tensors}
    is_said = file.config.target_modules not in (None, "all-linear")
    found = filter(file.config.targets, modules)
    return [each for each in found if is_said or each.rpartition(".")[2] in kinds]


def _short(value: object) -> str:
    return str(value)[:80]


def _pairs(
    stored: Mapping[str, StoredTensor], config: PeftConfig
) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    """A and B of each module that the adapter changes."""
    pairs: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        found = _TENSOR.fullmatch(name)
        if found is None:
            what = next(
                (what for mark, what in _OTHERS.items() if mark in name), "no part of a linear layer's"
            )
            raise AdapterError(
                f"tensor {name} is {what}, which is not served; train the linear layers of the decoder alone"
            )
        if tensor.dtype not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise AdapterError(f"tensor {name}: dtype = {tensor.dtype}; save it as one of {known}")
        pair = pairs.setdefault(found["module"], {})
        if found["part"] in pair:
            raise AdapterError(
                f"{WEIGHTS} has two tensors of {found['module']}.lora_{found['part']}; save one adapter alone"
            )
        pair[found["part"]] = tensor
    if not pairs:
        raise AdapterError(f"{WEIGHTS} holds no tensors; save the adapter again")
    for module, pair in pairs.items():
        _check_pair(module, pair, config)
    chosen = config.target_modules
    for name in () if chosen is None or isinstance(chosen, str) else chosen:
        if not any(_names([name], module) for module in pairs):
            raise AdapterError(
                f"{CONFIG}: target_modules names {name[:80]!r}, of which {WEIGHTS} has no tensor; save both "
                "together"
            )
    return {module: (pair["A"], pair["B"]) for module, pair in pairs.items()}


def _check_pair(module: str, pair: Mapping[str, StoredTensor], config: PeftConfig) -> None:
    if len(pair) < 2:
        missing = "B" if "A" in pair else "A"
        raise AdapterError(f"{module}: lora_{missing}.weight is missing; save the adapter again")
    rank, _ = config.scale_of(module)
    for part, tensor in pair.items():
        if len(tensor.shape) != 2 or tensor.shape[part == "B"] != rank:
            raise AdapterError(
                f"{module}.lora_{part}.weight has shape {list(tensor.shape)}, but {CONFIG} says r = {rank} "
                "for it; save the adapter again"
            )
    if not config.targets(module):
        raise AdapterError(
            f"{WEIGHTS} has tensors of {module}, which {CONFIG} does not name (target_modules = "
            f"{_short(config.target_modules)}); save both together"
        )


def _why_not(module: str, modules: Mapping[str, Module]) -> str:
    if ".experts." in module or module.endswith((".gate", ".router")):
        return (
            f"{WEIGHTS} has tensors of {module}: experts and routers take no adapters; train with "
            "target_modules of attention and shared experts alone"
        )
    for mark, what in _OTHERS.items():
        if mark in module:
            return f"{module} is {what}, which is not served; train the linear layers of the decoder alone"
    kinds = ", ".join(sorted({each.rpartition(".")[2] for each in modules}))
    return (
        f"{WEIGHTS} has tensors of {module}, which is no linear layer of this model that takes adapters "
        f"({kinds}); serve it beside the base that it was trained for"
    )


def _check_shapes(
    module: str,
    pair: tuple[StoredTensor, StoredTensor],
    served: Module,
    config: PeftConfig,
    max_rank: int,
) -> None:
    rank, _ = config.scale_of(module)
    for part, tensor, wanted in zip("AB", pair, ((rank, served.inputs), (served.outputs, rank)), strict=True):
        if tensor.shape != wanted:
            raise AdapterError(
                f"{module}.lora_{part}.weight has shape {list(tensor.shape)} where {list(wanted)} is needed: "
                f"it was trained for {config.base_model_name_or_path or 'another model'}, which is not this "
                "model; serve it beside that"
            )
    if rank > max_rank:
        raise AdapterError(
            f"{CONFIG}: r = {rank} of {module} exceeds engine.adapters.max_rank = {max_rank}; raise that, or "
            "train with a smaller rank"
        )
