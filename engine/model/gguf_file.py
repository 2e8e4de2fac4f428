"""GGUF files (llama.cpp's format) under the names of Hugging Face checkpoints. No torch.

The `gguf` package reads headers, metadata and blocks; here tensors get the names that layers ask for. What
converters changed on the way to GGUF is undone: the order of the rows of q and k (llama's rotation pairs
neighbouring rows there), norms of Gemma stored with one added, experts stored as one tensor.
"""

from __future__ import annotations

import re
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from checkpoint.gguf_parts import part_names
from engine.model.shards import TensorPart
from engine.model.spec import CheckpointError, TensorHeader

# Types that have a form in kernels/linear; those in TensorHeader's own names are dense.
DENSE_TYPES = ("F32", "F16", "BF16", "F64")

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "altup_proj": "model.altup_projections.{}",
    "altup_unembd_proj": "model.altup_unembed_projections.{}",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_experts_gate",
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PER_LAYER = _SANDWICH | {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_GEMMA3N = _PER_LAYER | {
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_GEMMA4 = _PER_LAYER | {
    "layer_output_scale": "layer_scalar",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_up_exps": "experts.{}.gate_up_proj",
    "ffn_down_exps": "experts.{}.down_proj",
    # Vectors that bear the names of the products that they belong to.
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
# Architecture to names that differ from the common ones.
NAMES: dict[str, dict[str, str]] = {
    "llama": _MIXTRAL,
    "qwen2": {},
    "qwen3": {},
    "qwen3moe": {},
    "gemma2": _SANDWICH,
    "gemma3": _SANDWICH,
    "gemma3n": _GEMMA3N,
    "gemma4": _GEMMA4,
    "olmo2": _SANDWICH,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "exaone4": _SANDWICH,
    "glm4": _SANDWICH | {"ffn_up": "mlp.gate_up_proj"},
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
    **{
        name: {}
        for name in (
            *("arcee", "cohere2", "command-r", "ernie4_5", "gemma", "granite", "hunyuan-dense", "nemotron"),
            *("olmoe", "phi2", "qwen2moe", "smollm3", "starcoder2"),
        )
    },
}
# Those whose rotation pairs neighbouring rows of q and k there, though not in their checkpoints.
_PAIRED = frozenset({"arcee", "granite", "llama", "smollm3"})
# Those whose norms are stored as they are, though their names begin as those of others.
_PLAIN_NORMS = frozenset({"gemma3n", "gemma4"})
# Frequencies of the rotation: read as part of the configuration.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class _Entry(msgspec.Struct, frozen=True):
    """Where a tensor of the model lies in the file."""

    tensor: Any
    expert: int | None
    # Heads whose rows are to be put in order; 0 when they are.
    num_paired_heads: int
    # Added to each element.
    offset: float

    def heads_of(self, num_rows: int) -> int:
        """Heads among so many of its rows, which are to be put in order."""
        return self.num_paired_heads * num_rows // self.tensor.data.shape[0] if self.num_paired_heads else 0


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
        self._entries: dict[str, _Entry] = {}
        for tensor in self.stored.values():
            self._enter(tensor)
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

    def header(self, name: str) -> TensorHeader:
        """The header of a tensor that every model has. Raises CheckpointError."""
        if name not in self.headers:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        return self.headers[name]

    def array(self, name: str, part: TensorPart | None = None) -> NDArray[Any]:
        """A tensor's numbers, or those of a part: float16 as stored, everything else in float32."""
        entry = self._entries[name]
        data = self._data(entry, part)
        kind = entry.tensor.tensor_type
        values: NDArray[Any] = data
        if kind.name not in ("F32", "F16", "F64"):
            try:
                values = self._gguf.quants.dequantize(data, kind)
            except NotImplementedError as error:
                raise CheckpointError(
                    f"{self.path}: tensor {entry.tensor.name} has the type {kind.name}, which is not read; "
                    "quantize the model to another type, such as Q4_K_M"
                ) from error
        if kind.name == "F64":
            values = values.astype(np.float32)
        values = _in_order(values, entry.heads_of(values.shape[0]))
        return np.array(values + np.float32(entry.offset) if entry.offset else values)

    def blocks(self, name: str, part: TensorPart | None = None) -> tuple[str, NDArray[np.uint8]]:
        """A quantized tensor's type and the bytes of its rows [N, bytes], or those of a part."""
        entry = self._entries[name]
        data = self._data(entry, part)
        return entry.tensor.tensor_type.name, _in_order(data, entry.heads_of(data.shape[0]))

    def block_of(self, name: str) -> int:
        """Inputs of a block of a tensor, which are not parted; 1 where each has its own number."""
        return int(self._gguf.GGML_QUANT_SIZES[self._entries[name].tensor.tensor_type][0])

    def _data(self, entry: _Entry, part: TensorPart | None) -> NDArray[Any]:
        """Of a tensor, or of a part: whole heads, or whole blocks of inputs."""
        data: NDArray[Any] = entry.tensor.data if entry.expert is None else entry.tensor.data[entry.expert]
        if part is None:
            return data
        if part.axis == 0:
            return data[part.begin : part.end]
        size, num_bytes = self._gguf.GGML_QUANT_SIZES[entry.tensor.tensor_type]
        begin, end = (edge // size * num_bytes // data.itemsize for edge in (part.begin, part.end))
        return data[:, begin:end]

    def _enter(self, tensor: Any) -> None:
        if tensor.name in ROPE_TENSORS:
            return
        name, _, suffix = tensor.name.rpartition(".")
        shifted = (
            self.architecture.startswith(("gemma", "nemotron")) and self.architecture not in _PLAIN_NORMS
        )
        has_offset = shifted and name.endswith("norm")
        offset = -1.0 if has_offset and suffix == "weight" else 0.0
        layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if layer is None:
            self._enter_all(tensor, f"{_GLOBAL_NAMES.get(name, name)}.{suffix}", offset)
            return
        names = _LAYER_NAMES | NAMES[self.architecture]
        whole = names.get(f"{layer[2]}.{suffix}")
        own = names.get(layer[2])
        target = f"model.layers.{layer[1]}.{own}.{suffix}" if own else tensor.name
        if whole is not None or "{}" in target:
            self._enter_all(tensor, target if whole is None else f"model.layers.{layer[1]}.{whole}", offset)
            return
        heads = 0
        if self.architecture in _PAIRED and layer[2] in ("attn_q", "attn_k"):
            count = "head_count" if layer[2] == "attn_q" else "head_count_kv"
            prefix = f"{self.architecture}.attention"
            given = self.metadata.get(f"{prefix}.{count}", self.metadata.get(f"{prefix}.head_count"))
            rows = tensor.data.shape[0]
            if isinstance(given, int) and (given < 1 or rows % (2 * given)):
                raise CheckpointError(
                    f"{self.path}: {prefix}.{count} = {given} does not divide the {rows} rows of "
                    f"{tensor.name} into heads"
                )
            # What is absent, or differs between layers, is refused by its name with the configuration.
            heads = given if isinstance(given, int) else 0
        self._entries[target] = _Entry(tensor, None, heads, offset)

    def _enter_all(self, tensor: Any, target: str, offset: float) -> None:
        """A tensor as it is, or those that it is stacked of, each by its number."""
        if "{}" not in target:
            self._entries[target] = _Entry(tensor, None, 0, offset)
            return
        for index in range(tensor.data.shape[0]):
            self._entries[target.format(index)] = _Entry(tensor, index, 0, offset)

    def _header(self, entry: _Entry) -> TensorHeader:
        shape = tuple(int(size) for size in reversed(entry.tensor.shape))
        kind = entry.tensor.tensor_type.name
        file = self._files[entry.tensor.name]
        return TensorHeader(file, kind, shape if entry.expert is None else shape[1:])


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


def _in_order(rows: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Rows of each head from (0, half, 1, half + 1, ...) back to 0, 1, 2, ..."""
    if not num_heads:
        return rows
    order = np.arange(rows.shape[0]).reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()
    return rows[order]
