"""Products on GPUs: dense weights by torch's library (cuBLAS), quantized ones and experts by Triton, fp8 by
torch._scaled_mm where the device has it.

Rows never see each other. But cuBLAS picks its kernel by the number of rows, so the last bits of a dense
product depend on how many others are computed with it. InvariantLinear has one kernel for all numbers of rows
instead: slower, and every output is a function of its own request. What that means for equal outputs,
docs/decisions/2026-11-22-kernels-products-on-gpus.md says.

Shape letters: M rows, K inputs, N outputs, X experts, R rows that chose an expert.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear.formats import (
    FP8_BLOCK,
    DenseWeight,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    PartedWeight,
    WeightFormat,
    dense_values,
    stack,
    with_minimum,
)
from kernels.linear.reference import Product
from kernels.linear.triton_dense import dense_batched_product, dense_product
from kernels.linear.triton_grouped import grouped_product
from kernels.linear.triton_linear import arranged, dense_levels, weight_only_product
from kernels.linear.triton_packing import pack_levels_for_triton
from kernels.linear.triton_rows import GroupedRows
from kernels.linear.triton_scaled import quantize_rows, scaled_product
from kernels.linear.triton_shapes import Workspace
from kernels.rows import Quantized, QuantizedRows, empty_scales

# torch._scaled_mm with a scale per row needs Hopper, and sizes that its tiles divide.
SCALED_MM_ARCH = (9, 0)
SCALED_MM_MULTIPLE = 16
# Up to so many Triton's product is the faster one (benchmarks/results/gpu-proof.jsonl).
MOST_TRITON_ROWS = 64
# Numbers of rows that it is tried with: a rest beside a tile, a long prompt.
PROBED_ROWS = (81, 8192)

_log = logging.getLogger(__name__)
# By a weight's shape and device.
_tried: dict[tuple[tuple[int, int], torch.device], bool] = {}


class WeightOnlyProduct:
    """Weights of 4 or 8 bits, inputs in floating point. For many rows the library multiplies the weight as
    numbers of the inputs' type, which are made anew each time: its matrix rate is worth more than they cost.
    """

    def __init__(self, weight: Int4Weight | Int8Weight, *, most_rows: int | None = None) -> None:
        # In another order: the weight that was given need not stay.
        self.kept = pack_levels_for_triton(weight)
        # None multiplies any number of rows alike.
        self.most_rows = most_rows
        Workspace.of(weight.scale.device)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [M, K] -> [M, N] in x's type."""
        if self.most_rows is None or x.shape[0] <= self.most_rows or x.element_size() > 2:
            return weight_only_product(x, self.kept, bias)
        return F.linear(arranged(x, self.kept), dense_levels(self.kept, x.dtype), bias)


class TritonIntegerProduct:
    """int8 with int8; inputs are rounded row by row."""

    def __init__(self, weight: Int8Weight) -> None:
        self.weight = weight
        self.scale = weight.scale[:, 0].contiguous()
        self.factors = weight.smoothing
        # Rows that are stored in another order are rounded here.
        self.quantizes: Quantized = "int8" if weight.order is None else "none"
        Workspace.of(weight.scale.device)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [M, K] -> [M, N] in x's type."""
        if self.weight.order is not None:
            # Smoothing is given in the inputs' own order.
            arranged = x if self.factors is None else (x.float() * self.factors).to(x.dtype)
            levels, scale = quantize_rows(arranged.index_select(1, self.weight.order), "int8")
        else:
            levels, scale = quantize_rows(x, "int8", factors=self.factors)
        return self.of_rows(QuantizedRows(levels=levels, scale=scale, dtype=x.dtype), bias)

    def of_rows(self, rows: QuantizedRows, bias: Tensor | None = None) -> Tensor:
        """See QuantizingProduct."""
        return scaled_product(rows.levels, rows.scale, self.weight.values, self.scale, bias, dtype=rows.dtype)


class Fp8Product:
    """fp8 with fp8, by Triton; scales per row and output, or by blocks of 128."""

    def __init__(self, weight: Fp8Weight) -> None:
        self.weight = weight
        self.factors: Tensor | None = None
        # A scale per row is found by whoever has the row at hand; scales of blocks are found here.
        self.quantizes: Quantized = "none" if weight.blocked else "fp8"
        Workspace.of(weight.scale.device)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [M, K] -> [M, N] in x's type."""
        levels, scale = quantize_rows(x, "fp8", block=FP8_BLOCK if self.weight.blocked else 0)
        return self.of_rows(QuantizedRows(levels=levels, scale=scale, dtype=x.dtype), bias)

    def of_rows(self, rows: QuantizedRows, bias: Tensor | None = None) -> Tensor:
        """See QuantizingProduct."""
        weight = self.weight
        return scaled_product(rows.levels, rows.scale, weight.values, weight.scale, bias, dtype=rows.dtype)


class ScaledMmProduct(Fp8Product):
    """fp8 with fp8 by torch._scaled_mm, a scale per row and per output. It computes bfloat16 alone, and its
    smallest tile has 128 rows; for other types and few rows Triton does.
    """

    def __init__(self, weight: Fp8Weight) -> None:
        super().__init__(weight)
        self.columns = weight.values.t()  # [K, N], inputs side by side
        self.row_of_scales = weight.scale[None].contiguous()  # [1, N]

    def of_rows(self, rows: QuantizedRows, bias: Tensor | None = None) -> Tensor:
        """See QuantizingProduct."""
        if rows.dtype != torch.bfloat16 or rows.levels.shape[0] <= MOST_TRITON_ROWS:
            return super().of_rows(rows, bias)
        out: Tensor = torch._scaled_mm(
            rows.levels,
            self.columns,
            scale_a=rows.scale[:, None],
            scale_b=self.row_of_scales,
            out_dtype=rows.dtype,
            use_fast_accum=True,
        )
        # Not inside the product: what types of bias it takes differs from release to release.
        return out if bias is None else out.add_(bias)


class Grouped:
    """Weights of experts side by side; what they share is how rows find them."""

    def __init__(self, num_weights: int) -> None:
        self.num_weights = num_weights

    def group(self, choice: Tensor) -> GroupedRows:
        """See GroupedProduct."""
        return GroupedRows.of(choice, self.num_weights)


class GroupedDense(Grouped):
    """Dense weights of experts."""

    def __init__(self, weights: Sequence[DenseWeight]) -> None:
        super().__init__(len(weights))
        self.weights = torch.stack([weight.values for weight in weights])  # [X, N, K]

    def __call__(
        self,
        x: Tensor,
        groups: GroupedRows,
        *,
        rows_per_input: int,
        bias: Tensor | None = None,
        gate: str | None = None,
    ) -> Tensor:
        """See GroupedProduct."""
        return grouped_product(
            x.contiguous(), self.weights, groups, rows_per_input=rows_per_input, bias=bias, gate=gate
        )


class GroupedWeightOnly(Grouped):
    """Experts of 4 or 8 bits, inputs in floating point."""

    def __init__(self, weights: Sequence[WeightFormat]) -> None:
        super().__init__(len(weights))
        int4 = [weight for weight in weights if isinstance(weight, Int4Weight)]
        if any(weight.minimum is not None for weight in int4):
            weights = [with_minimum(weight) for weight in int4]
        stacked = stack(weights, torch.float32)
        assert isinstance(stacked, Int4Weight | Int8Weight), "of one kind"
        self.weight = pack_levels_for_triton(stacked)  # [X * N, K]

    def __call__(
        self,
        x: Tensor,
        groups: GroupedRows,
        *,
        rows_per_input: int,
        bias: Tensor | None = None,
        gate: str | None = None,
    ) -> Tensor:
        """See GroupedProduct."""
        return weight_only_product(
            x.contiguous(),
            self.weight,
            bias,
            groups=groups,
            num_weights=self.num_weights,
            rows_per_input=rows_per_input,
            gate=gate,
        )


class GroupedScaled(Grouped):
    """Experts of int8 or fp8 whose inputs are rounded, too, row by row or by blocks of 128."""

    def __init__(self, weights: Sequence[Int8Weight] | Sequence[Fp8Weight]) -> None:
        super().__init__(len(weights))
        # Bytes, as fp8 cannot be stacked everywhere.
        values = torch.stack([weight.values.view(torch.uint8) for weight in weights])
        self.values = values.view(weights[0].values.dtype)  # [X, N, K]
        scales = [
            weight.scale[:, 0] if isinstance(weight, Int8Weight) else weight.scale for weight in weights
        ]
        self.scale = torch.stack(scales)  # [X, N], or [X, N/128, K/128]

    def __call__(
        self,
        x: Tensor,
        groups: GroupedRows,
        *,
        rows_per_input: int,
        bias: Tensor | None = None,
        gate: str | None = None,
    ) -> Tensor:
        """See GroupedProduct."""
        kind: Quantized = "int8" if self.values.dtype == torch.int8 else "fp8"
        levels, scale = quantize_rows(x.contiguous(), kind, block=FP8_BLOCK if self.scale.dim() == 3 else 0)
        return scaled_product(
            levels,
            scale,
            self.values,
            self.scale,
            bias,
            dtype=x.dtype,
            groups=groups,
            rows_per_input=rows_per_input,
            gate=gate,
        )


class TritonLinear:
    """Products of GPUs."""

    row_multiple = 1
    # Up to so many rows a weight of 4 or 8 bits is multiplied as it is; None says any number.
    most_packed_rows: int | None = 512

    def pack(self, weight: Tensor | WeightFormat) -> Product:
        """See LinearBackend."""
        if isinstance(weight, Fp8Weight):
            return ScaledMmProduct(weight) if _scaled_mm_takes(weight) else Fp8Product(weight)
        if isinstance(weight, Int8Weight) and weight.activations == "int8":
            return TritonIntegerProduct(weight)
        if isinstance(weight, Int8Weight | Int4Weight):
            return WeightOnlyProduct(weight, most_rows=self.most_packed_rows)
        # The library chooses its kernel.
        values = dense_values(weight)
        return lambda x, bias=None: F.linear(x, values, bias)

    def batched(self, left: Tensor, right: Tensor) -> Tensor:
        """See LinearBackend."""
        return torch.bmm(left, right)

    def grouped(
        self, weights: Sequence[WeightFormat | PartedWeight]
    ) -> GroupedDense | GroupedWeightOnly | GroupedScaled | None:
        """See LinearBackend. Experts with an order or smoothing of their own, or of unlike formats, are
        sorted on the host, one after another.
        """
        dense = [weight for weight in weights if isinstance(weight, DenseWeight)]
        if len(dense) == len(weights):
            return GroupedDense(dense)
        fp8 = [weight for weight in weights if isinstance(weight, Fp8Weight)]
        if len(fp8) == len(weights) and len({weight.blocked for weight in fp8}) == 1:
            return GroupedScaled(fp8)
        int8 = [weight for weight in weights if isinstance(weight, Int8Weight)]
        plain = all(weight.order is None and weight.smoothing is None for weight in int8)
        if len(int8) == len(weights) and plain:
            activations = {(weight.activations, weight.scale.shape[1]) for weight in int8}
            if activations == {("int8", 1)}:
                return GroupedScaled(int8)
            return GroupedWeightOnly(int8) if len(activations) == 1 else None
        int4 = [weight for weight in weights if isinstance(weight, Int4Weight) and weight.order is None]
        alike = len({weight.scale.shape[1] for weight in int4}) == 1
        return GroupedWeightOnly(int4) if len(int4) == len(weights) and alike else None


class InvariantLinear(TritonLinear):
    """Products of GPUs whose rows have the same bits in any batch: nothing is left to a library, which would
    choose by the number of rows.
    """

    most_packed_rows = None

    def pack(self, weight: Tensor | WeightFormat) -> Product:
        """See LinearBackend."""
        if isinstance(weight, Fp8Weight):
            return Fp8Product(weight)
        if isinstance(weight, Int8Weight | Int4Weight):
            return super().pack(weight)
        values = dense_values(weight)
        return lambda x, bias=None: dense_product(x, values, bias)

    def batched(self, left: Tensor, right: Tensor) -> Tensor:
        """See LinearBackend."""
        return dense_batched_product(left, right)


def _scaled_mm_takes(weight: Fp8Weight) -> bool:
    """Whether torch's own product computes this weight."""
    device = weight.values.device
    sizes = all(size % SCALED_MM_MULTIPLE == 0 for size in weight.shape)
    if device.type != "cuda" or weight.blocked or not sizes:
        return False
    if torch.cuda.get_device_capability(device) < SCALED_MM_ARCH:
        return False
    key = weight.shape, device
    if key not in _tried:
        _tried[key] = scaled_mm_computes(weight)
    return _tried[key]


def scaled_mm_computes(weight: Fp8Weight) -> bool:
    """Tries torch's own product at PROBED_ROWS; the log names what it refuses."""
    product = ScaledMmProduct(weight)
    for rows in PROBED_ROWS:
        levels = torch.zeros(rows, weight.shape[1], dtype=weight.values.dtype, device=weight.values.device)
        scale = empty_scales(rows, levels.device).fill_(1.0)
        try:
            product.of_rows(QuantizedRows(levels=levels, scale=scale, dtype=torch.bfloat16))
        except (RuntimeError, ValueError) as error:
            _log.warning(
                "linear: weights of %s outputs and %s inputs are Triton's: torch refuses %s rows: %s",
                *weight.shape,
                rows,
                error,
            )
            return False
    return True
