"""GGUF files (llama.cpp's format) under the names of Hugging Face checkpoints. No torch.

The `gguf` package reads headers, metadata and blocks; here tensors get the names that layers ask for. What
converters changed on the way to GGUF is undone (`gguf_changes`), and experts are taken from the tensor that
they share.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from checkpoint.gguf_parts import part_names
from engine.model.gguf_changes import UNCHANGED, Change, change_of, joined, split_of
from engine.model.gguf_names import GLOBAL_NAMES, HALVES, LAYER_NAMES, NAMES, SAME_NAMES
from engine.model.shards import TensorPart
from engine.model.spec import CheckpointError, TensorHeader

_log = logging.getLogger(__name__)

# Types that have a form in kernels/linear; those in TensorHeader's own names are dense.
DENSE_TYPES = ("F32", "F16", "BF16", "F64")

# Frequencies of the rotation: read as part of the configuration.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class _Entry(msgspec.Struct, frozen=True):
    """Where a tensor of the model lies in the file."""

    tensor: Any
    expert: int | None
    # What is undone when it is read.
    change: Change
    # A second tensor of values, which is joined to this one of keys.
    values: Any = None


class _Number:
    """A number of the metadata as the package gives tensors."""

    def __init__(self, name: str, data: NDArray[np.float32], package: Any) -> None:
        self.name, self.data, self.shape = name, data, [data.size]
        self.tensor_type = package.GGMLQuantizationType.F32


class GgufFile:
    """One model in GGUF, perhaps split over several files."""

    def __init__(self, path: Path) -> None:
        import gguf

        from checkpoint.gguf_reader import contents, open_gguf

        self.path = path
        self._gguf = gguf
        self._contents = partial(contents, path)
        parts = split_files(path)
        self._readers = [open_gguf(part) for part in parts]
        fields = self._readers[0].fields
        self.metadata: dict[str, Any] = {
            name: self._contents(field)
            for name, field in fields.items()
            if not name.startswith("tokenizer.ggml.")
        }
        self.architecture = str(self.metadata.get("general.architecture", ""))
        if self.architecture not in NAMES:
            raise CheckpointError(
                f"{path}: general.architecture = {self.architecture!r} is not supported; supported are "
                f"{', '.join(sorted(NAMES))}"
            )
        self.stored: dict[str, Any] = {}
        self._files: dict[str, str] = {}
        for part, reader in zip(parts, self._readers, strict=True):
            self._take_part(part, reader)
        stated = self.metadata.get("split.tensors.count", len(self.stored))
        if stated != len(self.stored):
            raise CheckpointError(
                f"{path}: split.tensors.count = {stated}, and its {len(parts)} files have {len(self.stored)} "
                "tensors; copy or download all of them again"
            )
        # Layers behind these predict further tokens, and are left.
        count, beyond = (self.number(name, 0) for name in ("block_count", "nextn_predict_layers"))
        self.num_layers, self.num_left = count - beyond, 0
        self._entries: dict[str, _Entry] = {}
        for tensor in self.stored.values():
            self._enter(tensor)
        self._join_latents()
        self._name_coefficients()
        if self.architecture in HALVES:
            self._name_halves()
        if self.architecture in SAME_NAMES:
            self._name_states()
        if self.num_left:
            _log.warning("%s: %d tensors of layers that predict are not served", path, self.num_left)
        self.headers = {name: self._header(entry) for name, entry in self._entries.items()}

    def _take_part(self, part: Path, reader: Any) -> None:
        for tensor in reader.tensors:
            if tensor.name in self.stored:
                raise CheckpointError(
                    f"{part}: tensor {tensor.name} is in {self._files[tensor.name]} already; the files are "
                    "not those of one model: copy or download them again"
                )
            self.stored[tensor.name] = tensor
            self._files[tensor.name] = part.name

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number of the architecture's metadata. Raises CheckpointError."""
        key = f"{self.architecture}.{name}"
        value = self.metadata.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.path}: {key} is missing")
        if not isinstance(value, int) or value < 0:
            raise CheckpointError(f"{self.path}: {key} = {value!r} is not a whole number")
        return value

    def header(self, name: str) -> TensorHeader:
        """The header of a tensor that every model has. Raises CheckpointError."""
        if name not in self.headers:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        return self.headers[name]

    def array(self, name: str, part: TensorPart | None = None) -> NDArray[Any]:
        """A tensor's numbers, or those of a part: float16 as stored, everything else in float32."""
        entry = self._entries[name]
        if entry.values is not None:
            whole = self._numbers(entry.tensor, self._data(entry, None))
            return _part_of(joined(whole, self._numbers(entry.values, entry.values.data)), part)
        if part is not None and entry.change.is_of_whole:
            return _part_of(self.array(name), part)
        return np.array(entry.change.undone(self._numbers(entry.tensor, self._data(entry, part))))

    def _numbers(self, tensor: Any, data: NDArray[Any]) -> NDArray[Any]:
        kind, values = tensor.tensor_type, data
        if kind.name not in ("F32", "F16", "F64"):
            try:
                values = self._gguf.quants.dequantize(data, kind)
            except NotImplementedError as error:
                raise CheckpointError(
                    f"{self.path}: tensor {tensor.name} has the type {kind.name}, which is not read; "
                    "quantize the model to another type, such as Q4_K_M"
                ) from error
        if kind.name == "F64":
            values = values.astype(np.float32)
        return values

    def blocks(self, name: str, part: TensorPart | None = None) -> tuple[str, NDArray[np.uint8]]:
        """A quantized tensor's type and the bytes of its rows [N, bytes], or those of a part."""
        entry = self._entries[name]
        return entry.tensor.tensor_type.name, self._data(entry, part)

    def block_of(self, name: str) -> int:
        """Inputs of a block of a tensor, which are not parted; 1 where each has its own number."""
        if self._entries[name].change.kind:
            return 1
        return int(self._gguf.GGML_QUANT_SIZES[self._entries[name].tensor.tensor_type][0])

    def _data(self, entry: _Entry, part: TensorPart | None) -> NDArray[Any]:
        """Of a tensor, or of a part (rows, or whole blocks of inputs), rows in the checkpoint's order."""
        data: NDArray[Any] = entry.tensor.data if entry.expert is None else entry.tensor.data[entry.expert]
        if part is None:
            return entry.change.in_order(data)
        if part.axis == 0:
            runs = [entry.change.in_order(data, run) for run in part.slices]
            return runs[0] if len(runs) == 1 else np.concatenate(runs)
        size, num_bytes = self._gguf.GGML_QUANT_SIZES[entry.tensor.tensor_type]
        ((first, behind),) = part.runs
        begin, end = (edge // size * num_bytes // data.itemsize for edge in (first, behind))
        return entry.change.in_order(data[:, begin:end])

    def _enter(self, tensor: Any) -> None:
        if tensor.name in ROPE_TENSORS:
            return
        layer = re.fullmatch(r"blk\.(\d+)\.(.+)", tensor.name)
        if layer is None:
            name, _, suffix = tensor.name.rpartition(".")
            self._enter_all(tensor, f"{GLOBAL_NAMES.get(name, name)}.{suffix}", tensor.name)
            return
        if int(layer[1]) >= self.num_layers:
            self.num_left += 1
            return
        # Falcon-H1's norms lack what they end in; decays and skips have nothing there.
        name = layer[2] if "." in layer[2] or layer[2].startswith("ssm_") else f"{layer[2]}.weight"
        if parts := split_of(self, tensor, name):
            prefix = f"model.layers.{layer[1]}"
            self._entries |= {f"{prefix}.{part}": _Entry(tensor, None, change) for part, change in parts}
            return
        names = LAYER_NAMES | NAMES[self.architecture]
        stem, _, suffix = name.rpartition(".")
        known = names.get(name) or (f"{names[stem]}.{suffix}" if stem in names else None)
        self._enter_all(tensor, f"model.layers.{layer[1]}.{known}" if known else tensor.name, name)

    def _enter_all(self, tensor: Any, target: str, name: str) -> None:
        """A tensor as it is, or those that it is stacked of, each by its number."""
        change = change_of(self, tensor, name)
        if "{}" not in target:
            self._entries[target] = _Entry(tensor, None, change)
            return
        for index in range(tensor.data.shape[0]):
            self._entries[target.format(index)] = _Entry(tensor, index, UNCHANGED)

    def _name_halves(self) -> None:
        """The only norm of a half layer that feeds forward is called as in layers of two halves."""
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}"
            if (
                f"{prefix}.mlp.up_proj.weight" in self._entries
                or f"{prefix}.mlp.gate.weight" in self._entries
            ):
                norm = self._entries.pop(f"{prefix}.input_layernorm.weight", None)
                if norm is not None:
                    self._entries[f"{prefix}.post_attention_layernorm.weight"] = norm

    def _name_states(self) -> None:
        """Products of layers with a state that are called as those of attention."""
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}"
            if f"{prefix}.state.A_log" in self._entries:
                for theirs, ours in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "out")):
                    product = self._entries.pop(f"{prefix}.self_attn.{theirs}_proj.weight", None)
                    if product is not None:
                        self._entries[f"{prefix}.state.{ours}_proj.weight"] = product

    def _join_latents(self) -> None:
        """Keys and values of latent attention, which lie apart and are one weight to layers."""
        for layer in range(self.num_layers):
            parts = [self._entries.pop(f"blk.{layer}.attn_{part}_b.weight", None) for part in "kv"]
            if None in parts:
                continue
            keys, values = (part.tensor for part in parts if part is not None)
            (nope, rank, heads), width = map(int, keys.shape), int(values.shape[1])
            change = Change(shape=(heads * (nope + width), rank), kind="F32")
            name = f"model.layers.{layer}.self_attn.kv_b_proj.weight"
            self._entries[name] = _Entry(keys, None, change, values)

    def _name_coefficients(self) -> None:
        """Numbers of activations that learn (xIELU), which are metadata there and tensors to layers."""
        for name in ("alpha_p", "alpha_n", "beta", "eps"):
            given = self.metadata.get(f"xielu.{name}")
            if given is None:
                continue
            values = given if isinstance(given, list) else [given] * self.num_layers
            if len(values) != self.num_layers:
                raise CheckpointError(
                    f"{self.path}: xielu.{name} has {len(values)} numbers for {self.num_layers} layers"
                )
            change = UNCHANGED if name.startswith("alpha") else Change(shape=())
            for layer, value in enumerate(values):
                tensor = _Number(f"xielu.{name}", np.array([value], np.float32), self._gguf)
                self._files[tensor.name] = self.path.name
                self._entries[f"model.layers.{layer}.mlp.act_fn.{name}"] = _Entry(tensor, None, change)

    def _header(self, entry: _Entry) -> TensorHeader:
        shape = tuple(int(size) for size in reversed(entry.tensor.shape))
        kind = entry.tensor.tensor_type.name
        file = self._files[entry.tensor.name]
        own = shape if entry.expert is None else shape[1:]
        shape = own if entry.change.shape is None else entry.change.shape
        return TensorHeader(file, entry.change.kind or kind, shape)


def _part_of(values: NDArray[Any], part: TensorPart | None) -> NDArray[Any]:
    if part is None:
        return values
    return np.concatenate([values[(slice(None),) * part.axis + (run,)] for run in part.slices], part.axis)


def split_files(path: Path) -> list[Path]:
    """All files of a model of which `path` is the only or the first one."""
    files = [path.with_name(name) for name in part_names(path.name)]
    for file in files:
        if len(files) > 1 and not file.is_file():
            raise CheckpointError(f"{file} is missing, though the model is split into {len(files)} files")
    return files


def open_gguf(path: Path) -> GgufFile:
    """The file, read once per process while it does not change. Raises CheckpointError."""
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return _open_once(path, changed)


@lru_cache(maxsize=2)
def _open_once(path: Path, changed: int) -> GgufFile:
    return GgufFile(path)
