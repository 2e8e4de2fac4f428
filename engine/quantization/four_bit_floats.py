"""Weights that checkpoints hold as floats of 4 bits: MXFP4, NVFP4, and NF4 or FP4 of bitsandbytes.

Where products take codes, they stay 4 bits wide; elsewhere they become int8 by groups (MXFP4), or dense.
Sources: OCP microscaling formats 1.0, the fp4 compressors of compressed-tensors, the checkpoints that
NVIDIA's Model Optimizer exports, and QuantState of bitsandbytes.

Shape letters: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.quantization.gguf_blocks import TWICE_FP4_BOOK, mxfp4_of
from kernels.linear.formats import CodedWeight, DenseWeight, FloatCodedWeight, Int8Weight, WeightFormat
from runtime.errors import ConfigError

MXFP4_GROUP = 32
# The exponent that is no number.
MXFP4_NAN = 255
NVFP4_GROUP = 16
# Parts of a weight of bitsandbytes beside it, and the names that the kind of its codes ends in.
BITSANDBYTES_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_KINDS = ("nf4", "fp4")


class FourBitSource(Protocol):
    """Where readers find tensors; see `stored.TensorSource`."""

    dtype: torch.dtype

    @property
    def keeps_codes(self) -> bool:
        """Whether products take codes of a few bits, and fp8, as they are."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""

    def discard(self, name: str) -> None:
        """Declares a tensor, if it is there, to be known and not used."""

    def stored(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """The tensor as stored."""


def mxfp4_weight(blocks: Tensor, scales: Tensor, *, coded: bool) -> CodedWeight | Int8Weight:
    """One expert of gpt-oss: blocks uint8 [N, G, 16] (even inputs in the low four bits) and scales uint8
    [N, G] (exponents with bias 127), exactly: in codes, or in int8 by groups of 32.
    """
    return mxfp4_of(_pairs(blocks), scales, coded=coded)


def mxfp4_linear(source: FourBitSource, name: str, outputs: int, inputs: int) -> CodedWeight | Int8Weight:
    """The layer `name` as compressed-tensors stores it: weight_packed uint8 [N, K/2], and weight_scale uint8
    [N, K/32] of exponents.
    """
    if inputs % MXFP4_GROUP:
        raise ConfigError(
            f"tensor {name}.weight_packed: {inputs} inputs do not fall into the groups of {MXFP4_GROUP} of "
            "MXFP4; repeat the conversion that wrote it, without this layer"
        )
    data = source.stored(f"{name}.weight_packed", (outputs, inputs // 2))
    scales = source.stored(f"{name}.weight_scale", (outputs, inputs // MXFP4_GROUP))
    if scales.dtype != torch.uint8:
        raise ConfigError(f"tensor {name}.weight_scale is stored in {scales.dtype}; MXFP4 has uint8 there")
    if bool((scales == MXFP4_NAN).any()):
        raise ConfigError(f"tensor {name}.weight_scale holds a scale that is no number")
    return mxfp4_weight(data.view(outputs, -1, MXFP4_GROUP // 2), scales, coded=source.keeps_codes)


def nvfp4_weight(
    source: FourBitSource, name: str, outputs: int, inputs: int, packed: str, factor: float
) -> WeightFormat:
    """The layer `name`: uint8 [N, K/2] at its part `packed`, weight_scale float8_e4m3 [N, K/16]; numbers are
    fp4 times that scale times `factor`.
    """
    if inputs % NVFP4_GROUP:
        raise ConfigError(
            f"tensor {name}.{packed}: {inputs} inputs do not fall into the groups of {NVFP4_GROUP} of NVFP4; "
            "repeat the conversion that wrote it, without this layer"
        )
    data = source.stored(f"{name}.{packed}", (outputs, inputs // 2))
    step = source.stored(f"{name}.weight_scale", (outputs, inputs // NVFP4_GROUP))
    for tensor, part, wanted in ((data, packed, torch.uint8), (step, "weight_scale", torch.float8_e4m3fn)):
        if tensor.dtype != wanted:
            raise ConfigError(f"tensor {name}.{part} is stored in {tensor.dtype}; NVFP4 has {wanted} there")
    scale = torch.full((outputs, 1), factor / 2, device=data.device)
    weight = CodedWeight(codes=_pairs(data), bits=4, book=TWICE_FP4_BOOK, scale=scale, step=step)
    return _served(source, weight)


def factor_of(source: FourBitSource, name: str) -> float:
    """The number in a tensor of one element. Raises ConfigError where it is no scale."""
    value = source.stored(name).flatten()
    if value.numel() != 1 or not float(value.float()) > 0:
        raise ConfigError(f"tensor {name} is {value[:4].tolist()}; one number above 0 is needed")
    return float(value.float())


def bitsandbytes_weight(source: FourBitSource, name: str, outputs: int, inputs: int) -> WeightFormat:
    """weight uint8 [N * K / 2, 1] (even inputs in the high four bits), absmax [N * G], quant_map [16]; with
    nested absmax levels of 8 bits, nested_quant_map [256] and nested_absmax for some of them each.
    """
    stem = f"{name}.weight"
    state, at = _quant_state(source, stem)
    size = state.get("blocksize")
    if state.get("shape") != [outputs, inputs]:
        raise ConfigError(f"tensor {at} says shape = {state.get('shape')}, config.json {[outputs, inputs]}")
    if not isinstance(size, int) or size < 2 or (outputs * inputs) % size:
        raise ConfigError(f"tensor {at} says blocksize = {size!r} for {outputs} x {inputs} weights")
    data = source.stored(stem)
    if data.dtype != torch.uint8 or data.numel() != outputs * inputs // 2:
        raise ConfigError(
            f"tensor {stem} holds {data.numel()} of {data.dtype}; {outputs} x {inputs} weights of 4 bits are "
            f"{outputs * inputs // 2} of torch.uint8; save the checkpoint with bnb_4bit_quant_storage = uint8"
        )
    data = data.view(outputs, -1)
    codes = torch.stack((data >> 4, data & 15), dim=-1).flatten(1)
    book = source.stored(f"{stem}.quant_map", (16,)).float()
    absmax = _absmax(source, stem, state, outputs * inputs // size)
    if inputs % size or size % 2:
        # Blocks that go on in the next output.
        values = (book[codes.long()].view(-1, size) * absmax[:, None]).view(outputs, inputs)
        return DenseWeight(values=values.to(source.dtype))
    return _served(source, FloatCodedWeight(codes=codes, book=book, scale=absmax.view(outputs, -1)))


def _quant_state(source: FourBitSource, stem: str) -> tuple[dict[str, Any], str]:
    """What bitsandbytes says of a weight, and the tensor that says so."""
    names = [f"{stem}.quant_state.bitsandbytes__{kind}" for kind in _KINDS]
    found = next((name for name in names if source.has(name)), None)
    if found is None:
        raise ConfigError(
            f"tensor {names[0]} is missing, and {stem} is no weight in floating point; save the checkpoint "
            "again with bitsandbytes in 4 bits"
        )
    try:
        state = json.loads(bytes(source.stored(found).tolist()))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"tensor {found} is not the JSON that bitsandbytes writes: {error}") from error
    if not isinstance(state, dict):
        raise ConfigError(f"tensor {found} is not the JSON that bitsandbytes writes: no table of keys")
    return state, found


def _absmax(source: FourBitSource, stem: str, state: dict[str, Any], count: int) -> Tensor:
    """What each block's codes are multiplied by [count], in float32."""
    absmax = source.stored(f"{stem}.absmax", (count,))
    if absmax.dtype != torch.uint8:
        return absmax.float()
    size, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if not isinstance(size, int) or size < 1 or not isinstance(offset, int | float):
        raise ConfigError(
            f"tensor {stem}.absmax has levels, and {stem}.quant_state.* no nested_blocksize or nested_offset"
        )
    levels = source.stored(f"{stem}.nested_quant_map", (256,)).float()[absmax.long()]
    outer = source.stored(f"{stem}.nested_absmax", (-(-count // size),)).float()
    return levels * outer.repeat_interleave(size)[:count] + offset


def _pairs(data: Tensor) -> Tensor:
    """Bytes [N, ...] -> codes [N, K], the low four bits of each byte first."""
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(1)


def _served(source: FourBitSource, weight: CodedWeight | FloatCodedWeight) -> WeightFormat:
    if source.keeps_codes:
        return weight
    return DenseWeight(values=weight.dequantize().to(source.dtype))
