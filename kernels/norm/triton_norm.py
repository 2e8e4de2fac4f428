"""Root-mean-square and layer norms in one pass over a row, with what models do right before and after it.

Shape letters: T tokens, E elements of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.norm.backends import RowNorm
from kernels.rows import Quantized, QuantizedRows, empty_scales

# Largest magnitude of each quantized type; 448 is the end of float8_e4m3.
LIMITS: dict[str, float] = {"none": 0.0, "int8": 127.0, "fp8": 448.0}


class Normed(NamedTuple):
    """Results of one call; what was not asked for is None."""

    out: Tensor  # [T, E]
    residual: Tensor | None  # [T, E] x + residual, in x's type
    scale: Tensor | None  # [T] float32: out * scale is the normed row


@triton.jit
def scaled_row(values, LIMIT: tl.constexpr, ROUND: tl.constexpr):
    """A row of float32 (zeros where nothing is) divided such that its largest magnitude is LIMIT, and what it
    was divided by. ROUND rounds to whole numbers, half to even.

    A row of zeros keeps its scale of zero; a row that is not finite becomes zeros with a scale that is not.
    """
    # Maxima drop NaN, sums do not.
    scale = tl.max(tl.abs(values), axis=0) / LIMIT + tl.sum(values * 0.0, axis=0)
    usable = (scale > 0) & (scale < float("inf"))
    values = tl.where(usable, values / scale, 0.0)
    if ROUND:
        # Adding and taking away 1.5 * 2**23 leaves the nearest whole number.
        values = (values + 12582912.0) - 12582912.0
    return values, scale


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    bias,
    out,
    residual_out,
    factors,
    scale_out,
    row_stride,
    inner,
    inner_stride,
    weight_stride,
    width,
    eps,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CENTERED: tl.constexpr,
    FACTORS: tl.constexpr,
    LIMIT: tl.constexpr,
    ROUND: tl.constexpr,
):
    """One program per row, `inner` of which lie inner_stride apart, their weights weight_stride. LIMIT > 0
    quantizes the row, times factors where there are some, to out's type; ROUND rounds to whole numbers first.
    """
    row = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, BLOCK)
    inside = offset < width
    at = x + row // inner * row_stride + row % inner * inner_stride
    values = tl.load(at + offset, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + row * width + offset, mask=inside, other=0.0).to(tl.float32)
        # The stream is kept in its own type, and normed as it is kept.
        kept = values.to(residual_out.dtype.element_ty)
        tl.store(residual_out + row * width + offset, kept, mask=inside)
        values = kept.to(tl.float32)
    if CENTERED:
        values = tl.where(inside, values - tl.sum(values, axis=0) / width, 0.0)
    mean = tl.sum(values * values, axis=0) / width
    learned = tl.load(weight + row % inner * weight_stride + offset, mask=inside, other=0.0).to(tl.float32)
    normed = values * (1.0 / tl.sqrt(mean + eps)) * learned
    if HAS_BIAS:
        normed += tl.load(bias + offset, mask=inside, other=0.0)
    if LIMIT > 0:
        # Values are rounded to the model's type before they are quantized, as without a fused kernel.
        normed = normed.to(x.dtype.element_ty).to(tl.float32)
        if FACTORS:
            normed *= tl.load(factors + offset, mask=inside, other=0.0)
        normed, scale = scaled_row(normed, LIMIT, ROUND)
        tl.store(scale_out + row, scale)
    tl.store(out + row * width + offset, normed.to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    quantized: Quantized = "none",
    factors: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    centered: bool = False,
) -> Normed:
    """x [T, E] (rows may be apart) plus residual [T, E], normed by weight [E]; if asked, multiplied by
    factors [E] float32 and quantized per row.

    Without residual, x may be [T, H, E], too, whose rows are normed one by one, by weights [H, E] of their
    own where they have them; the result is as wide.
    """
    width = x.shape[-1]
    rows = x.numel() // width
    assert x.stride(-1) == 1, "elements of a row lie side by side"
    inner, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    kinds = {"none": x.dtype, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
    out = torch.empty(x.shape, dtype=kinds[quantized], device=x.device)
    stream = torch.empty(rows, width, dtype=x.dtype, device=x.device) if residual is not None else None
    scale = empty_scales(rows, x.device) if quantized != "none" else None
    block = triton.next_power_of_2(width)
    if rows:
        rms_norm_kernel[(rows,)](
            x,
            residual if residual is not None else x,
            weight,
            bias if bias is not None else weight,
            out,
            stream if stream is not None else out,
            factors if factors is not None else weight,
            scale if scale is not None else weight,
            x.stride(0),
            inner,
            inner_stride,
            weight.stride(0) if weight.dim() == 2 else 0,
            width,
            eps,
            BLOCK=block,
            HAS_RESIDUAL=residual is not None,
            HAS_BIAS=bias is not None,
            CENTERED=centered,
            FACTORS=factors is not None,
            LIMIT=LIMITS[quantized],
            ROUND=quantized == "int8",
            num_warps=max(1, min(16, block // 512)),
        )
    return Normed(out, stream, scale)


class TritonNorm:
    """One pass over each row, sum with the residual included."""

    def plain(self, x: Tensor, norm: RowNorm) -> Tensor:
        """See NormBackend."""
        return rms_norm(x, norm.weight, norm.eps, bias=norm.bias, centered=norm.centered).out

    def added(self, x: Tensor, change: Tensor, norm: RowNorm) -> tuple[Tensor, Tensor]:
        """See NormBackend."""
        normed = rms_norm(change, norm.weight, norm.eps, x, bias=norm.bias, centered=norm.centered)
        assert normed.residual is not None, "asked for"
        return normed.residual, normed.out

    def quantized(
        self, x: Tensor, change: Tensor | None, norm: RowNorm, kind: Quantized, factors: Tensor | None
    ) -> tuple[Tensor, QuantizedRows]:
        """See QuantizingNorm."""
        source, residual = (x, None) if change is None else (change, x)
        normed = rms_norm(
            source, norm.weight, norm.eps, residual, kind, factors, norm.bias, centered=norm.centered
        )
        assert normed.scale is not None, "asked for"
        rows = QuantizedRows(levels=normed.out, scale=normed.scale, dtype=x.dtype)
        return x if normed.residual is None else normed.residual, rows
