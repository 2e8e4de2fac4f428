"""Quantizes dense weights while a checkpoint is loaded.

- "int8": one scale per output, inputs stay as they are (W8A16).
- "w8a8": the same levels, inputs rounded to int8 per token. Channels of inputs with outliers are made smaller
  and their weights larger beforehand (SmoothQuant, arXiv 2211.10438, strength 0.5), where their ranges are
  known from calibration.
- "int4": groups of neighbouring inputs. Each group tries clipped ranges and keeps the one of least squared
  error, symmetric (levels around zero) or asymmetric (from the lowest to the highest weight), whichever is
  nearer over the whole weight.

- "fp8": float8_e4m3, one scale per output; inputs are rounded to it per token.

Shape letters: N outputs, K inputs, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.quantization.scheme import group_size_for
from kernels.linear.formats import (
    FP8_LIMIT,
    INT4_MIDDLE,
    DenseWeight,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    WeightFormat,
    pack_levels,
)

SMOOTHING_STRENGTH = 0.5
# Parts of a group's range that levels may span; weights beyond are clipped.
CLIPPED_RANGES = (1.0, 0.95, 0.9, 0.85, 0.8)
# Elements that are in float32 at a time: a head of 150,000 outputs took five such copies at once, 2.5 GB.
PIECE_ELEMENTS = 4 << 20


def quantize(weight: Tensor, config: EngineConfig, input_range: Tensor | None = None) -> WeightFormat:
    """weight [N, K] in the format that `engine.quantize` asks for.

    input_range [K]: largest magnitude of each input in calibration, or None when unknown. A weight whose
    inputs do not fall into groups of even 32 stays dense.
    """
    if config.quantize == "int8":
        return int8_weight(weight)
    if config.quantize == "w8a8":
        return rounding_weight(weight, input_range)
    if config.quantize == "int4":
        size = group_size_for(weight.shape[1], config.quantization.group_size)
        return int4_weight(weight, size) if size else DenseWeight(values=weight)
    if config.quantize == "fp8":
        return fp8_weight(weight)
    return DenseWeight(values=weight)


def fp8_weight(weight: Tensor) -> Fp8Weight:
    """One scale per output: the largest magnitude maps to 448. Inputs are rounded, too."""
    wide = weight.float()
    scale = (wide.abs().amax(1) / FP8_LIMIT).clamp(min=torch.finfo(torch.float32).tiny)
    levels = (wide / scale[:, None]).clamp(-FP8_LIMIT, FP8_LIMIT)
    return Fp8Weight(values=levels.to(torch.float8_e4m3fn), scale=scale)


def int8_weight(weight: Tensor, smoothing: Tensor | None = None) -> Int8Weight:
    """One scale per output, the largest magnitude to 127; of the weight over smoothing [K], where given."""
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(weight.shape[0], 1, device=weight.device)
    for part in _pieces(weight):
        wide = weight[part].float()
        if smoothing is not None:
            wide = wide / smoothing
        scale[part] = (wide.abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        values[part] = (wide / scale[part]).round_().clamp_(-127, 127)
    return Int8Weight(values=values, scale=scale)


def _pieces(weight: Tensor) -> list[slice]:
    """Rows of weight [N, K] that are in float32 at a time."""
    rows = max(1, PIECE_ELEMENTS // max(1, weight.shape[1]))
    return [slice(first, first + rows) for first in range(0, weight.shape[0], rows)]


def rounding_weight(weight: Tensor, input_range: Tensor | None) -> Int8Weight:
    """int8 levels for inputs that are rounded as well, smoothed where the inputs' range is known."""
    smoothing = None if input_range is None else _smoothing(weight, input_range.float())
    made = int8_weight(weight, smoothing)
    return Int8Weight(values=made.values, scale=made.scale, smoothing=smoothing, activations="int8")


def _smoothing(weight: Tensor, input_range: Tensor) -> Tensor:
    """What inputs are multiplied by [K]: (range of weights / range of inputs) ^ 0.5, around 1."""
    tiny = 1e-5
    of_inputs, of_weights = input_range.clamp(min=tiny), weight.abs().amax(0).float().clamp(min=tiny)
    factor = of_weights**SMOOTHING_STRENGTH / of_inputs ** (1 - SMOOTHING_STRENGTH)
    return factor / factor.log().mean().exp()


def int4_weight(weight: Tensor, group_size: int) -> Int4Weight:
    """Levels of 4 bits by groups of `group_size` inputs."""
    pieces = _pieces(weight)
    found = [_clipped(_grouped(weight[part], group_size)) for part in pieces]
    symmetric, asymmetric = (
        [torch.cat(parts) for parts in zip(*candidates, strict=True)]
        for candidates in zip(*found, strict=True)
    )
    is_symmetric = float(symmetric[2].sum()) <= float(asymmetric[2].sum())
    scale, minimum, _ = symmetric if is_symmetric else asymmetric
    packed = torch.cat(
        [_levels(_grouped(weight[part], group_size), scale[part], minimum[part]) for part in pieces]
    )
    return Int4Weight(packed=packed, scale=scale, minimum=None if is_symmetric else minimum)


def _grouped(weight: Tensor, group_size: int) -> Tensor:
    return weight.float().view(weight.shape[0], -1, group_size)  # [N, G, size]


_Clipped = tuple[Tensor, Tensor, Tensor]


def _clipped(grouped: Tensor) -> tuple[_Clipped, _Clipped]:
    """The best symmetric and the best asymmetric ranges of groups, as `_best_clip` gives them."""
    highest, lowest = grouped.amax(-1), grouped.amin(-1)
    # The level of -8 takes the larger side, so that 7.5 on average covers both.
    larger = torch.where(highest > -lowest, highest, lowest)
    spread = (highest - lowest).clamp(min=1e-10)
    scale, _, error = _best_clip(grouped, [(-larger * part / 8, larger * part) for part in CLIPPED_RANGES])
    asymmetric = _best_clip(grouped, [(spread * part / 15, lowest * part) for part in CLIPPED_RANGES])
    return (scale, -INT4_MIDDLE * scale, error), asymmetric


def _best_clip(grouped: Tensor, candidates: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """(scale, minimum, squared error), each [N, G], of the candidate nearest to its group."""
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for scale, minimum in candidates:
        levels = _rounded(grouped, scale, minimum)
        error = (levels * scale[..., None] + minimum[..., None] - grouped).square().sum(-1)
        if best is None:
            best = scale, minimum, error
        else:
            nearer = error < best[2]
            new = (scale, minimum, error)
            best = tuple(torch.where(nearer, a, b) for a, b in zip(new, best, strict=True))  # type: ignore[assignment]
    assert best is not None, "there is at least one candidate"
    return best


def _rounded(grouped: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    return ((grouped - minimum[..., None]) / safe[..., None]).round().clamp(0, 15)


def _levels(grouped: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return pack_levels(_rounded(grouped, scale, minimum).flatten(1))
