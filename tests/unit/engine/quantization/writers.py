"""Writes small checkpoints in the published formats of quantized weights, number by number as their
descriptions say, and without the code that reads them.

Each writer takes a float weight [N, K] and returns (stored tensors by suffix, what they stand for).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.engine.checkpoints import edit_config

Stored = tuple[dict[str, Tensor], Tensor]
Writer = Callable[[Tensor], Stored]
Array = NDArray[Any]


def stored_bytes(weight: object) -> int:
    """Bytes of the tensors of a weight."""
    return sum(each.nbytes for each in vars(weight).values() if isinstance(each, Tensor))


def words_of(levels: Array, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Packs along the last axis: field i of a word (i * bits up) holds the level at order[i]."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    words = np.zeros((*levels.shape[:-1], levels.shape[-1] // per_word), np.uint32)
    for word in range(words.shape[-1]):
        for field in range(per_word):
            level = levels[..., word * per_word + order[field]].astype(np.uint32)
            words[..., word] |= level << np.uint32(field * bits)
    return torch.from_numpy(words.view(np.int32).copy())


def grouped_levels(
    weight: Tensor, groups: Array, bits: int, *, symmetric: bool
) -> tuple[Array, Array, Array]:
    """Levels [N, K], scales [N, G] (float16 values) and zero points [N, G]; groups [K] names each input's."""
    values, top = weight.numpy().astype(np.float64), (1 << bits) - 1
    num_groups = int(groups.max()) + 1
    levels = np.zeros(values.shape, np.int64)
    scales = np.zeros((values.shape[0], num_groups))
    zeros = np.zeros((values.shape[0], num_groups), np.int64)
    for group in range(num_groups):
        part = values[:, groups == group]
        if symmetric:
            scale, zero = np.abs(part).max(1) / ((top + 1) / 2 - 1), np.full(len(part), (top + 1) // 2)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scale = (high - low) / top
            zero = np.clip(np.round(-low / scale), 0, top).astype(np.int64)
        scale = scale.astype(np.float16).astype(np.float64)
        levels[:, groups == group] = np.clip(np.round(part / scale[:, None]) + zero[:, None], 0, top)
        scales[:, group], zeros[:, group] = scale, zero
    return levels, scales, zeros


def _meaning(levels: Array, scales: Array, zeros: Array, groups: Array) -> Tensor:
    return torch.from_numpy(((levels - zeros[:, groups]) * scales[:, groups]).astype(np.float32))


def _halves(array: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).half()


def awq(weight: Tensor, *, group_size: int = 32) -> Stored:
    """AutoAWQ, version "gemm"."""
    groups = np.arange(weight.shape[1]) // group_size
    levels, scales, zeros = grouped_levels(weight, groups, 4, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words_of(levels.T, 4, order),
        "qzeros": words_of(zeros.T, 4, order),
        "scales": _halves(scales.T),
    }
    return tensors, _meaning(levels, scales, zeros, groups)


def gptq(
    weight: Tensor,
    *,
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = True,
    lowered: int = 1,
    permutation: Array | None = None,
    with_g_idx: bool = True,
) -> Stored:
    """AutoGPTQ; `lowered` is by how much zero points are stored too low, `permutation` [K] is desc_act."""
    inputs = weight.shape[1]
    size = inputs if group_size == -1 else group_size
    groups = np.arange(inputs) // size
    if permutation is not None:
        shuffled = np.empty_like(groups)
        shuffled[permutation] = groups
        groups = shuffled
    levels, scales, zeros = grouped_levels(weight, groups, bits, symmetric=symmetric)
    tensors = {
        "qweight": words_of(levels, bits).T.contiguous(),
        "qzeros": words_of((zeros.T - lowered) % (1 << bits), bits),
        "scales": _halves(scales.T),
    }
    if with_g_idx:
        tensors["g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return tensors, _meaning(levels, scales, zeros, groups)


def packed(
    weight: Tensor, *, bits: int = 4, group_size: int = 32, symmetric: bool = True, g_idx: Array | None = None
) -> Stored:
    """compressed-tensors, "pack-quantized"."""
    inputs = weight.shape[1]
    groups = np.arange(inputs) // (inputs if group_size == -1 else group_size)
    if g_idx is not None:
        groups = groups[g_idx]
    levels, scales, zeros = grouped_levels(weight, groups, bits, symmetric=symmetric)
    tensors = {
        "weight_packed": words_of(levels, bits),
        "weight_scale": _halves(scales),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words_of(zeros.T, bits).T.contiguous()
    if g_idx is not None:
        tensors["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return tensors, _meaning(levels, scales, zeros, groups)


def int_quantized(weight: Tensor, *, per_tensor: bool = False) -> Stored:
    """compressed-tensors, "int-quantized": signed levels as they are."""
    largest = weight.abs().amax() if per_tensor else weight.abs().amax(1, keepdim=True)
    scale = (largest / 127).bfloat16()
    levels = (weight / scale.float()).round().clamp(-128, 127)
    return {"weight": levels.to(torch.int8), "weight_scale": scale}, levels * scale.float()


def float_quantized(weight: Tensor, *, per_tensor: bool = False) -> Stored:
    """compressed-tensors, "float-quantized"."""
    largest = weight.abs().amax() if per_tensor else weight.abs().amax(1, keepdim=True)
    scale = largest / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": stored, "weight_scale": scale, "input_scale": torch.tensor(1.0)}
    return tensors, stored.float() * scale


def block_fp8(weight: Tensor, *, block: int = 48) -> Stored:
    """Fine-grained fp8 as DeepSeek-V3 is released in; the last blocks are cut."""
    rows, columns = (-(-count // block) for count in weight.shape)
    scale, stored = torch.zeros(rows, columns), torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
    meaning = torch.zeros_like(weight)
    for row in range(rows):
        for column in range(columns):
            place = (
                slice(row * block, (row + 1) * block),
                slice(column * block, (column + 1) * block),
            )
            scale[row, column] = weight[place].abs().max() / 448
            stored[place] = (weight[place] / scale[row, column]).to(torch.float8_e4m3fn)
            meaning[place] = stored[place].float() * scale[row, column]
    return {"weight": stored, "weight_scale_inv": scale}, meaning


def rewrite(
    folder: Path,
    model: transformers.PreTrainedModel,
    settings: dict[str, Any],
    writer: Writer,
    *,
    head: bool = False,
) -> None:
    """Stores every linear layer of a saved checkpoint by `writer`, and gives `model` the weights that this
    stands for.
    """
    tensors = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or (name == "lm_head" and not head):
            continue
        stored, meaning = writer(module.weight.detach())
        with torch.no_grad():
            module.weight.copy_(meaning)
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


# By OCP microscaling formats 1.0: sign, two bits of exponent, one of mantissa.
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight [N, K] -> blocks uint8 [N, K/32, 16], scales uint8 [N, K/32], and what they stand for [N, K]."""
    grouped = weight.view(weight.shape[0], -1, 32)
    exponent = torch.floor(torch.log2(grouped.abs().amax(-1))) - 2
    scaled = grouped / torch.exp2(exponent)[..., None]
    table = torch.tensor(FP4)
    code = (scaled.abs()[..., None] - table).abs().argmin(-1)
    meaning = table[code] * scaled.sign() * torch.exp2(exponent)[..., None]
    code = code + 8 * (scaled < 0)
    blocks = code[..., 0::2] + 16 * code[..., 1::2]
    return blocks.to(torch.uint8), (exponent + 127).to(torch.uint8), meaning.flatten(1)


def mxfp4_experts(folder: Path, model: transformers.PreTrainedModel) -> dict[str, Tensor]:
    """Stores the experts of a saved gpt-oss so, and gives `model` the weights that this stands for; returns
    what is stored.
    """
    tensors = load_file(folder / "model.safetensors")
    for layer, module in enumerate(model.model.layers):
        for part in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{part}"
            dense = tensors.pop(name)  # [X, K, N]
            made = [mxfp4(expert.T.contiguous()) for expert in dense]
            tensors[f"{name}_blocks"] = torch.stack([blocks for blocks, _, _ in made])
            tensors[f"{name}_scales"] = torch.stack([scales for _, scales, _ in made])
            with torch.no_grad():
                getattr(module.mlp.experts, part).copy_(torch.stack([m.T for _, _, m in made]))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["x"]})
    return tensors


def mxfp4_packed(weight: Tensor) -> Stored:
    """compressed-tensors, "mxfp4-pack-quantized"."""
    blocks, scales, meaning = mxfp4(weight)
    return {"weight_packed": blocks.flatten(1), "weight_scale": scales}, meaning


def fp4_codes(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of the nearest fp4 to each number, and what they stand for."""
    table = torch.tensor(FP4)
    size = (scaled.abs()[..., None] - table).abs().argmin(-1)
    return (size + 8 * (scaled < 0)).to(torch.uint8), table[size] * scaled.sign()


def nvfp4(weight: Tensor, *, divides: bool) -> Stored:
    """NVFP4, low halves of bytes first: as compressed-tensors stores it, with a global scale that divides the
    scales of groups, or as the Model Optimizer does, with one that multiplies them.
    """
    grouped = weight.view(weight.shape[0], -1, 16)
    factor = weight.abs().max() / (6 * 448)
    if divides:
        stored_factor = 1 / factor
        factor = 1 / stored_factor
    else:
        stored_factor = factor
    scale = (grouped.abs().amax(-1) / 6 / factor).to(torch.float8_e4m3fn)
    wide = scale.float()[..., None] * factor
    codes, meaning = fp4_codes(torch.where(wide > 0, grouped / wide, torch.zeros(())))
    codes = codes.flatten(1)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    meaning = (meaning * wide).flatten(1)
    if divides:
        one = stored_factor.reshape(1)
        return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": one}, meaning
    return {"weight": packed, "weight_scale": scale, "weight_scale_2": stored_factor}, meaning


# By QLoRA (arXiv 2305.14314), appendix E.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)


def nf4(weight: Tensor, *, nested: bool = False, size: int = 32) -> Stored:
    """bitsandbytes in 4 bits, high halves of bytes first; with `nested` largest magnitudes are levels."""
    blocks = weight.flatten().view(-1, size)
    absmax, book = blocks.abs().amax(-1), torch.tensor(NF4)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": size, "shape": list(weight.shape)}
    tensors: dict[str, Tensor] = {"quant_map": book, "absmax": absmax}
    if nested:
        levels, offset, inner = torch.linspace(-1, 1, 256), float(absmax.mean()), 16
        padded = torch.zeros(-(-len(absmax) // inner) * inner)
        padded[: len(absmax)] = absmax - offset
        outer = padded.view(-1, inner).abs().amax(-1)
        wide = outer.repeat_interleave(inner)[: len(absmax)]
        chosen = ((absmax - offset) / wide)[:, None].sub(levels).abs().argmin(-1)
        absmax = levels[chosen] * wide + offset
        tensors |= {"absmax": chosen.to(torch.uint8), "nested_absmax": outer, "nested_quant_map": levels}
        state |= {"nested_blocksize": inner, "nested_offset": offset, "nested_dtype": "float32"}
    codes = (blocks / absmax[:, None])[..., None].sub(book).abs().argmin(-1)
    meaning = (book[codes] * absmax[:, None]).view(weight.shape)
    flat = codes.flatten().to(torch.uint8)
    text = json.dumps(state).encode()
    tensors["quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    parts = {f"weight.{name}": tensor for name, tensor in tensors.items()}
    return parts | {"weight": (flat[0::2] << 4 | flat[1::2])[:, None]}, meaning
