"""Small GGUF files as llama.cpp's converter makes them, by the writer and the names of the `gguf` package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

# Blocks that the package decodes and cannot make: places of float16 scales, and what these are. Drawn, they
# have every pattern of bits; `rounded` stands for the model's own weights.
RANDOM_BLOCKS: dict[Kind, tuple[tuple[int, ...], float]] = {
    Kind.Q2_K: ((80, 82), 3e-3),
    Kind.Q3_K: ((108,), 1e-3),
    Kind.Q4_K: ((0, 2), 3e-4),
    Kind.Q5_K: ((0, 2), 1.5e-4),
    Kind.Q6_K: ((208,), 1e-4),
    Kind.IQ4_NL: ((0,), 5e-4),
    Kind.IQ4_XS: ((0,), 3e-5),
}


LAYER_NORMS = ("layer_norm_eps", "norm_eps", "norm_epsilon")
# Those whose rows of q and k the converter reorders, and those to whose norms' weights it adds one.
PAIRED = ("llama", "granite", "smollm3", "arcee")
OFFSET = ("gemma", "nemotron")
Encoder = Callable[[NDArray[np.float32]], NDArray[np.uint8]]


def write(
    path: Path,
    model: transformers.PreTrainedModel,
    arch: str,
    kinds: Mapping[str, Kind],
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, NDArray[np.float32] | tuple[NDArray[Any], Kind]] | None = None,
    rope_theta: float = 500.0,
    rounded: Mapping[Kind, Encoder] | None = None,
    split: int = 0,
) -> None:
    """Stores `model` in the types that `kinds` gives for parts of GGUF names ("" is every matrix), and gives
    the model the weights that this stands for. With `split` a file has so many tensors at most.
    """
    config = model.config
    writer = gguf.GGUFWriter(str(path), arch, split_max_tensors=split)
    _describe(writer, config, arch, metadata or {}, rope_theta)
    number = {name: arch_number for arch_number, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            stem, _, suffix = name.rpartition(".")
            target = names.get_name(stem)
            assert target is not None, name
            values = _as_converted(parameter.numpy().copy(), f"{target}.{suffix}", arch, config)
            kind = _kind(f"{target}.{suffix}", values, kinds)
            data, meaning = _encode(values, kind, (rounded or {}).get(kind))
            writer.add_tensor(f"{target}.{suffix}", data, raw_dtype=kind)
            parameter.copy_(torch.from_numpy(_as_read(meaning, f"{target}.{suffix}", arch, config)))
    for name, values in (extra or {}).items():
        data, raw = values if isinstance(values, tuple) else (values, None)
        writer.add_tensor(name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(
    writer: gguf.GGUFWriter, config: Any, arch: str, metadata: Mapping[str, Any], rope_theta: float
) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    layer_norm = next((getattr(config, name) for name in LAYER_NORMS if hasattr(config, name)), None)
    if layer_norm is None:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(layer_norm)
    writer.add_rope_freq_base(rope_theta)
    writer.add_vocab_size(config.vocab_size)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for name, value in metadata.items():
        key = f"{arch}.{name}"
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    writer.add_eos_token_id(7)


def _kind(name: str, values: NDArray[Any], kinds: Mapping[str, Kind]) -> Kind:
    if values.ndim < 2:
        return Kind.F32
    return next(kind for part, kind in kinds.items() if part in name)


def _as_converted(values: NDArray[Any], target: str, arch: str, config: Any) -> NDArray[Any]:
    if arch in PAIRED and ("attn_q." in target or "attn_k." in target):
        heads = config.num_attention_heads if "attn_q." in target else config.num_key_value_heads
        # The converter's permutation: halves of a head take turns.
        split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return split.swapaxes(1, 2).reshape(values.shape)
    return values + 1 if arch.startswith(OFFSET) and target.endswith("norm.weight") else values


def _as_read(values: NDArray[Any], target: str, arch: str, config: Any) -> NDArray[Any]:
    if arch in PAIRED and ("attn_q." in target or "attn_k." in target):
        heads = config.num_attention_heads if "attn_q." in target else config.num_key_value_heads
        split = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
        return split.swapaxes(1, 2).reshape(values.shape)
    return values - 1 if arch.startswith(OFFSET) and target.endswith("norm.weight") else values


def _encode(values: NDArray[Any], kind: Kind, rounded: Encoder | None) -> tuple[NDArray[Any], NDArray[Any]]:
    """Stored data, and the float32 numbers that it stands for."""
    if rounded is not None:
        data: NDArray[Any] = rounded(values.astype(np.float32))
    elif kind in RANDOM_BLOCKS:
        places, scale = RANDOM_BLOCKS[kind]
        numbers, size = gguf.GGML_QUANT_SIZES[kind]
        shape = (*values.shape[:-1], values.shape[-1] // numbers, size)
        draw = np.random.default_rng(values.shape[0])
        blocks = draw.integers(0, 256, shape, dtype=np.uint8)
        for place in places:
            # So that weights are about as large as those of the other tensors.
            blocks[..., place : place + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        data = blocks.reshape(*values.shape[:-1], -1)
    else:
        data = gguf.quants.quantize(values.astype(np.float32), kind)
    return data, gguf.quants.dequantize(data, kind).astype(np.float32).reshape(values.shape)


def drawn_blocks(kind: Kind, rows: int, inputs: int, seed: int = 0) -> torch.Tensor:
    """Rows of blocks [rows, bytes]; bits are drawn, and float16 scales as numbers."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(seed)
    blocks = draw.integers(0, 256, (rows, inputs // numbers, size), dtype=np.uint8)
    has_minimum = kind in (Kind.Q4_1, Kind.Q5_1)
    for place in RANDOM_BLOCKS[kind][0] if kind in RANDOM_BLOCKS else (0, 2)[: 1 + has_minimum]:
        scales = draw.normal(size=blocks.shape[:2]).astype(np.float16)
        blocks[..., place : place + 2] = scales[..., None].view(np.uint8)
    return torch.from_numpy(blocks.reshape(rows, -1))
