"""Weights that checkpoints hold quantized, read into the formats of `kernels/linear`.

Each reader takes the tensors of one linear layer by their stored names. What a method cannot express exactly
in those formats (asymmetric 8-bit levels) becomes a dense weight in the serving type, as do fp8 and codes
where nothing multiplies them. Sources:
AutoAWQ's WQLinear_GEMM, AutoGPTQ's and GPTQModel's QuantLinear, the compressors of compressed-tensors, and
the fine-grained fp8 of DeepSeek-V3's release.

Shape letters: N outputs, K inputs, G groups of inputs, W levels in an int32 word, X experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from engine.quantization.four_bit_floats import (
    BITSANDBYTES_PARTS,
    bitsandbytes_weight,
    factor_of,
    mxfp4_linear,
    nvfp4_weight,
)
from engine.quantization.gguf_blocks import block_readers
from engine.quantization.scheme import FLOAT_TYPES, LayerGroup, Scheme
from kernels.linear.formats import (
    FP8_BLOCK,
    DenseWeight,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    WeightFormat,
    pack_levels,
)
from runtime.errors import ConfigError

# Column of each four-bit field of an AWQ word, lowest bits first.
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


# Tensors that a layer has beside its weight, or in its place, once a method has quantized it.
PARTS = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "compressed-tensors": tuple(
        f"weight_{part}" for part in ("packed", "scale", "global_scale", "zero_point", "g_idx", "shape")
    ),
    "fp8": ("weight_scale_inv",),
    "bitsandbytes": tuple(f"weight.{part}" for part in BITSANDBYTES_PARTS),
    "modelopt": ("weight_scale", "weight_scale_2"),
}


class TensorSource(Protocol):
    """Where readers find tensors."""

    dtype: torch.dtype

    @property
    def keeps_fp8(self) -> bool:
        """Whether fp8 weights stay as they are: products take them, and round inputs as well."""

    @property
    def keeps_codes(self) -> bool:
        """Whether products take codes of a few bits, and fp8, as they are."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""

    def has_some(self, suffix: str) -> bool:
        """Whether any layer has a tensor whose name ends in a dot and `suffix`."""

    def element_type(self, name: str) -> str:
        """Name of the type that a tensor is stored in; empty when it is missing."""

    def discard(self, name: str) -> None:
        """Declares a tensor, if it is there, to be known and not used."""

    def stored(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """The tensor as stored. Raises CheckpointError when it is missing or of another shape."""

    def blocks(self, name: str, shape: tuple[int, ...]) -> tuple[str, Tensor] | None:
        """Type and rows [N, bytes] of a tensor that GGUF stores in blocks; None for types that `stored`
        decodes. Raises CheckpointError.
        """


def read_weight(
    source: TensorSource, name: str, outputs: int, inputs: int, scheme: Scheme
) -> WeightFormat | None:
    """The weight of the linear layer `name`, or None when it is not quantized: its weight is in floating
    point. Raises ConfigError, which names what a quantized layer lacks and what a dense one has too much.
    """
    stored_as = source.element_type(f"{name}.weight")
    if stored_as in FLOAT_TYPES:
        for part in PARTS.get(scheme.method, ()):
            if source.has(f"{name}.{part}"):
                raise ConfigError(
                    f"tensor {name}.{part} is a part of {scheme.method}, but {name}.weight is stored in "
                    f"{stored_as}; repeat the conversion that wrote both"
                )
        return None
    try:
        return _READERS[scheme.method](source, name, outputs, inputs, scheme)
    except (RuntimeError, IndexError, TypeError) as error:
        # Types and shapes that no tool writes.
        raise ConfigError(
            f"the tensors of {name} are not a weight of {outputs} x {inputs} as {scheme.method} stores "
            f"it: {error}"
        ) from error


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 words [..., C] -> levels [..., C * 32/bits], from the lowest bits up."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    levels = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return levels.flatten(-2)


def _awq(source: TensorSource, name: str, outputs: int, inputs: int, scheme: Scheme) -> WeightFormat | None:
    """qweight int32 [K, N/8], qzeros int32 [G, N/8], scales [G, N]; weight = (level - zero) * scale."""
    _whole_words(name, outputs, 8)
    scales = _scale(source, f"{name}.scales")
    groups = _groups(name, scales.shape[0], inputs)
    scales = _shaped(f"{name}.scales", scales, (groups, outputs))
    words = source.stored(f"{name}.qweight", (inputs, outputs // 8))
    zeros = source.stored(f"{name}.qzeros", (groups, outputs // 8))
    place = torch.argsort(torch.tensor(AWQ_COLUMNS))

    def columns(packed: Tensor) -> Tensor:
        return unpack(packed, 4).view(packed.shape[0], -1, 8)[..., place].flatten(1)

    return _four_bits(columns(words).T, scales.T, columns(zeros).T)


def _gptq(source: TensorSource, name: str, outputs: int, inputs: int, scheme: Scheme) -> WeightFormat | None:
    """qweight int32 [K/W, N], qzeros int32 [G, N/W], scales [G, N], g_idx int32 [K] (group of each input);
    weight = (level - zero) * scale.
    """
    per_word = 32 // scheme.bits
    _whole_words(name, inputs, per_word)
    _whole_words(name, outputs, per_word)
    scales = _scale(source, f"{name}.scales")
    groups = scales.shape[0]
    scales = _shaped(f"{name}.scales", scales, (groups, outputs))
    words = source.stored(f"{name}.qweight", (inputs // per_word, outputs))
    levels = unpack(words.T.contiguous(), scheme.bits)  # [N, K]
    zeros = unpack(source.stored(f"{name}.qzeros", (groups, outputs // per_word)), scheme.bits)
    # The first version lowers zero points by one when it packs them; those of zero wrap around.
    zeros = (zeros + scheme.zero_point_offset) & ((1 << scheme.bits) - 1)
    group_of_input = None
    # Tools write it for all layers or for none.
    if scheme.has_order or source.has_some("g_idx"):
        group_of_input = source.stored(f"{name}.g_idx", (inputs,)).long()
    return _by_groups(name, levels, scales.T, zeros.T, group_of_input, scheme.bits, source.dtype)


def _compressed(
    source: TensorSource, name: str, outputs: int, inputs: int, scheme: Scheme
) -> WeightFormat | None:
    """Packed levels (weight_packed), or levels or fp8 in `weight`; weight_scale says by what they are scaled.

    Static ranges of activations are not used: rows are rounded by their own largest magnitude.
    """
    group = scheme.group_of(name)
    for unused in ("input_scale", "input_zero_point", "input_global_scale"):
        source.discard(f"{name}.{unused}")
    if source.element_type(f"{name}.weight_packed") == "U8":
        if source.element_type(f"{name}.weight_scale") == "U8":
            return mxfp4_linear(source, name, outputs, inputs)
        factor = 1 / factor_of(source, f"{name}.weight_global_scale")
        return nvfp4_weight(source, name, outputs, inputs, "weight_packed", factor)
    is_packed = source.has(f"{name}.weight_packed") or source.has(f"{name}.weight_shape")
    if is_packed and not source.has(f"{name}.weight"):
        return _pack_quantized(source, name, outputs, inputs, scheme)
    values = source.stored(f"{name}.weight", (outputs, inputs))
    scale = _scale(source, f"{name}.weight_scale").float()
    if values.dtype != torch.int8:
        return _eight_bits(source, name, values, scale, scheme.block)
    scale = _per_output(name, scale, outputs)
    _groups(f"{name}.weight_scale", scale.shape[1], inputs)
    if _has(source, f"{name}.weight_zero_point", scheme.has_zero_points(name)):
        zeros = _per_output(name, source.stored(f"{name}.weight_zero_point").float(), outputs)
        if zeros.any():
            _refuse_symmetric(name, group)
            grouped = values.float().view(outputs, scale.shape[1], -1) - zeros[..., None]
            return DenseWeight(values=(grouped * scale[..., None]).flatten(1).to(source.dtype))
    rounds = scheme.int8_activations and scale.shape[1] == 1
    return Int8Weight(values=values, scale=scale, activations="int8" if rounds else "float")


def _refuse_symmetric(name: str, group: LayerGroup | None) -> None:
    if group is not None and not group.has_zero_points:
        raise ConfigError(
            f"tensor {name}.weight_zero_point moves levels, but quantization_config.config_groups says that "
            "the layer's are symmetric; repeat the conversion that wrote them"
        )


def _has(source: TensorSource, name: str, is_needed: bool) -> bool:
    """Whether a tensor is to be read: one that is needed and missing is refused by the reading."""
    return is_needed or source.has(name)


def _pack_quantized(
    source: TensorSource, name: str, outputs: int, inputs: int, scheme: Scheme
) -> WeightFormat:
    """weight_packed int32 [N, K/W] of levels raised by half their range, weight_scale [N, G],
    weight_zero_point int32 [N/W, G] packed along the outputs, weight_g_idx [K], weight_shape [2].
    """
    group = scheme.group_of(name)
    words = source.stored(f"{name}.weight_packed")
    bits = next((bits for bits in (4, 8) if words.shape == (outputs, -(-inputs * bits // 32))), 0)
    if not bits:
        raise ConfigError(
            f"tensor {name}.weight_packed has shape {list(words.shape)}; for {outputs} x {inputs} weights of "
            "4 or 8 bits it needs as many rows and an eighth or a quarter of the columns"
        )
    shape = source.stored(f"{name}.weight_shape").tolist()
    if shape != [outputs, inputs]:
        raise ConfigError(f"tensor {name}.weight_shape is {shape}, config.json implies {[outputs, inputs]}")
    levels = unpack(words, bits)[:, :inputs]
    scale = _scale(source, f"{name}.weight_scale").float()
    scale = _per_output(name, scale, outputs)
    zeros = torch.full_like(scale, 1 << (bits - 1), dtype=torch.int32)
    if _has(source, f"{name}.weight_zero_point", scheme.has_zero_points(name)):
        packed = source.stored(f"{name}.weight_zero_point", (-(-outputs * bits // 32), scale.shape[1]))
        zeros = unpack(packed.T.contiguous(), bits)[:, :outputs].T
        if bool((zeros != 1 << (bits - 1)).any()):
            _refuse_symmetric(name, group)
    group_of_input = None
    # One that the configuration does not name is left, and so refused as unexpected.
    if source.has(f"{name}.weight_g_idx") if group is None else group.has_order:
        group_of_input = source.stored(f"{name}.weight_g_idx", (inputs,)).long()
    return _by_groups(name, levels, scale, zeros, group_of_input, bits, source.dtype)


def _fp8(source: TensorSource, name: str, outputs: int, inputs: int, scheme: Scheme) -> WeightFormat | None:
    """weight fp8 [N, K], weight_scale_inv: what each block is multiplied by."""
    values = source.stored(f"{name}.weight", (outputs, inputs))
    scale = _scale(source, f"{name}.weight_scale_inv").float()
    source.discard(f"{name}.input_scale")
    return _eight_bits(source, name, values, scale, scheme.block)


def _modelopt(
    source: TensorSource, name: str, outputs: int, inputs: int, scheme: Scheme
) -> WeightFormat | None:
    """What NVIDIA's Model Optimizer exports: NVFP4 (weight uint8 [N, K/2], weight_scale_2: a factor for all),
    or fp8 with a scale.
    """
    source.discard(f"{name}.input_scale")
    source.discard(f"{name}.pre_quant_scale")
    if scheme.bits == 4:
        factor = factor_of(source, f"{name}.weight_scale_2")
        return nvfp4_weight(source, name, outputs, inputs, "weight", factor)
    values = source.stored(f"{name}.weight", (outputs, inputs))
    return _eight_bits(source, name, values, _scale(source, f"{name}.weight_scale").float(), scheme.block)


def _eight_bits(
    source: TensorSource, name: str, values: Tensor, scale: Tensor, block: tuple[int, int]
) -> WeightFormat:
    """Values [N, K] in floating point of 8 bits: as they are, where products take them with their scales (per
    tensor, per output, or per block of 128 x 128), else dense.
    """
    if values.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise ConfigError(f"tensor {name}.weight is stored in {values.dtype}; supported are int8 and fp8")
    outputs, inputs = values.shape
    keeps, rounds = source.keeps_fp8 or source.keeps_codes, not source.keeps_codes
    if keeps and values.dtype == torch.float8_e4m3fn:
        if scale.numel() in (1, outputs) and (scale.ndim < 2 or scale.shape[1] == 1):
            whole = scale.reshape(-1).expand(outputs).contiguous()
            return Fp8Weight(values=values, scale=whole, rounds_inputs=rounds)
        blocks = (-(-outputs // FP8_BLOCK), inputs // FP8_BLOCK)
        if block == (FP8_BLOCK, FP8_BLOCK) and not inputs % FP8_BLOCK and scale.shape == blocks:
            return Fp8Weight(values=values, scale=scale.contiguous(), rounds_inputs=rounds)
    return DenseWeight(values=_scaled(name, values.float(), scale, block).to(source.dtype))


def _gguf(source: TensorSource, name: str, outputs: int, inputs: int, scheme: Scheme) -> WeightFormat | None:
    """Blocks of 32 (or 8 times 32) inputs, as ggml-common.h and ggml-quants.c lay them out."""
    found = source.blocks(f"{name}.weight", (outputs, inputs))
    if found is None:
        return None
    return block_readers(coded=source.keeps_codes)[found[0]](found[1].view(outputs, -1))


def _by_groups(
    name: str,
    levels: Tensor,
    scale: Tensor,
    zeros: Tensor,
    group_of_input: Tensor | None,
    bits: int,
    dtype: torch.dtype,
) -> WeightFormat:
    """levels [N, K], scale and zeros [N, G], group of each input [K] or neighbours."""
    inputs, groups = levels.shape[1], scale.shape[1]
    size = inputs // groups
    order = None
    if group_of_input is not None:
        sizes = torch.bincount(group_of_input, minlength=groups)
        if sizes.shape[0] != groups or int(sizes.sum()) != inputs:
            raise ConfigError(f"tensor {name}.g_idx names groups beyond the {groups} of its scales")
        order = torch.argsort(group_of_input, stable=True)
        if bool((sizes != size).any()):
            # Groups of unequal size (K is no multiple) have no common form.
            picked_scale, picked_zeros = scale[:, group_of_input], zeros[:, group_of_input]
            return DenseWeight(values=((levels - picked_zeros) * picked_scale.float()).to(dtype))
        if torch.equal(order, torch.arange(inputs)):
            order = None
    _groups(name, groups, inputs)
    arranged = levels if order is None else levels[:, order]
    if bits == 4 and size % 2 == 0:
        return _four_bits(arranged, scale, zeros, order)
    middle = 1 << (bits - 1)
    if bits == 8 and bool((zeros == middle).all()):
        values = (arranged - middle).to(torch.int8)
        return Int8Weight(values=values, scale=scale.float().contiguous(), order=order)
    grouped = arranged.reshape(levels.shape[0], groups, size) - zeros[..., None]
    dense = (grouped * scale.float()[..., None]).flatten(1)
    if order is not None:
        dense = torch.empty_like(dense).index_copy_(1, order, dense)
    return DenseWeight(values=dense.to(dtype))


def _four_bits(levels: Tensor, scale: Tensor, zeros: Tensor, order: Tensor | None = None) -> Int4Weight:
    scale = scale.float().contiguous()
    minimum = None if bool((zeros == 8).all()) else -zeros.float() * scale
    return Int4Weight(packed=pack_levels(levels), scale=scale, minimum=minimum, order=order)


def _groups(name: str, groups: int, inputs: int) -> int:
    if not groups or inputs % groups:
        raise ConfigError(
            f"tensor {name}: {inputs} inputs do not fall into the {groups} groups of its scales"
        )
    return groups


def _whole_words(name: str, count: int, per_word: int) -> None:
    if count % per_word:
        raise ConfigError(
            f"tensor {name}.qweight: {count} is not a multiple of the {per_word} levels of a word"
        )


def _shaped(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tensor.shape != shape:
        raise ConfigError(f"tensor {name} has shape {list(tensor.shape)}, but {list(shape)} is implied")
    return tensor


def _scale(source: TensorSource, name: str) -> Tensor:
    scale = source.stored(name)
    if not scale.is_floating_point():
        raise ConfigError(
            f"tensor {name} is stored in {scale.dtype}; scales are read in floating point alone"
        )
    return scale


def _per_output(name: str, scale: Tensor, outputs: int) -> Tensor:
    """[N, G] from one number, one per output, or [N, G]."""
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(outputs, 1).contiguous()
    if scale.ndim == 1:
        scale = scale[:, None]
    if scale.ndim != 2 or scale.shape[0] != outputs or not scale.shape[1]:
        raise ConfigError(f"tensor {name}.weight_scale has shape {list(scale.shape)} for {outputs} outputs")
    return scale.contiguous()


def _scaled(name: str, values: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """values [N, K] times a scale of one number, per output, or per block (the last block may be cut)."""
    outputs, inputs = values.shape
    if scale.numel() in (1, outputs) and (scale.ndim < 2 or scale.shape[1] == 1):
        return values * _per_output(name, scale, outputs)
    expected = tuple(-(-count // size) for count, size in zip(values.shape, block, strict=True))
    if scale.shape != expected:
        raise ConfigError(
            f"tensor {name}: scales of shape {list(scale.shape)} do not cover {outputs} x {inputs} weights "
            f"in blocks of {block[0]} x {block[1]}, which need {list(expected)}"
        )
    wide = scale.repeat_interleave(block[0], 0)[:outputs].repeat_interleave(block[1], 1)[:, :inputs]
    return values * wide


_READERS: dict[str, Callable[[TensorSource, str, int, int, Scheme], WeightFormat | None]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    # Only the experts of gpt-oss are stored so; `model.weights` reads them.
    "mxfp4": lambda *_: None,
    "bitsandbytes": lambda source, name, outputs, inputs, _: bitsandbytes_weight(
        source, name, outputs, inputs
    ),
    "modelopt": _modelopt,
    "gguf": _gguf,
}
