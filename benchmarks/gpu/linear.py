"""Matrix products of the shapes of Llama-3.1-8B: bfloat16 by torch, and the quantized ones of the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.device import Gpu, Roofs, Work
from benchmarks.gpu.report import Report
from kernels.linear.formats import Int4Weight, Int8Weight
from kernels.linear.triton_backend import TritonLinear
from kernels.linear.triton_dense import dense_product
from kernels.linear.triton_scaled import scaled_product

TITLE = "Matrix products"
# Outputs and inputs: the stacked projections, the way out of attention, gate and up, down.
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
GROUP = 128


def run(gpu: Gpu, report: Report) -> None:
    """Decode batches and a prompt, each weight format beside bfloat16."""
    roofs = gpu.roofs()
    report.row(what="roofs", **roofs.fields())
    shapes = gpu.pick(SHAPES, {"tiny": (64, 256)})
    for rows in gpu.pick([1, 16, 64, 128, 8192], [5]):
        for name, (outputs, inputs) in shapes.items():
            _measure(gpu, report, roofs, name, rows, outputs, inputs)


def _measure(gpu: Gpu, report: Report, roofs: Roofs, name: str, rows: int, outputs: int, inputs: int) -> None:
    x = torch.randn(rows, inputs, device=gpu.device).to(gpu.dtype)
    flops = 2.0 * rows * outputs * inputs
    # Weights in turn, so that none is still in the L2.
    copies = max(1, min(16, gpu.pick(300 << 20, 1) // (outputs * inputs) + 1))
    dense = [torch.randn(outputs, inputs, device=gpu.device).to(gpu.dtype) for _ in range(copies)]
    baseline = gpu.time([lambda weight=weight: x @ weight.T for weight in dense])
    row = {"what": name, "rows": rows, "outputs": outputs, "inputs": inputs}
    moved = 2.0 * (outputs * inputs + rows * (inputs + outputs))
    report.row(**row, by="bf16, torch", **baseline.fields(), **_shares(flops, moved, baseline, roofs))
    for kind, (works, weight_bytes) in _Formats(gpu, x, outputs, copies).all().items():
        try:
            timing = gpu.time(works())
        except Exception as error:
            report.failed(error, **row, by=kind)
            continue
        moved = weight_bytes + 2.0 * rows * (inputs + outputs)
        report.row(
            **row,
            by=kind,
            **timing.fields(),
            **_shares(flops, moved, timing, roofs),
            times_bf16=baseline.seconds / timing.seconds,
        )


def _shares(flops: float, moved: float, timing: Any, roofs: Roofs) -> dict[str, float]:
    return {
        "of_matrix_rate": flops / timing.seconds / roofs.bf16_flops_per_s,
        "of_bandwidth": moved / timing.seconds / roofs.bytes_per_s,
    }


class _Formats:
    """Products of x (rows, inputs) with random weights (outputs, inputs) in each format, `copies` of them."""

    def __init__(self, gpu: Gpu, x: Tensor, outputs: int, copies: int) -> None:
        self._gpu, self._x, self._copies = gpu, x, copies
        self._rows, self._inputs = x.shape
        self._outputs = outputs

    def all(self) -> dict[str, tuple[Callable[[], list[Work]], float]]:
        """Name to the products (made when they are asked for) and the bytes of a weight."""
        size, float8 = self._outputs * self._inputs, torch.float8_e4m3fn
        by_row = {"fp8 by row, torch._scaled_mm": (lambda: self._torch_scaled(by_row=True), float(size))}
        return {
            "W4A16": (self._int4, size / 2 + 2 * size / GROUP),
            "W8A16": (self._int8, float(size)),
            "W8A8": (lambda: self._scaled(torch.int8, blocked=False), float(size)),
            "fp8 by row": (lambda: self._scaled(float8, blocked=False), float(size)),
            "fp8 by 128x128": (lambda: self._scaled(float8, blocked=True), float(size)),
            "fp8 by tensor, torch._scaled_mm": (lambda: self._torch_scaled(by_row=False), float(size)),
            # torch 2.11, which machines with a GPU have, takes one scale alone on a CPU.
            **({} if self._gpu.rehearses else by_row),
            "bf16, invariant": (self._invariant, 2.0 * size),
        }

    def _bytes(self, low: int, high: int, kind: torch.dtype, width: int) -> Tensor:
        return torch.randint(low, high, (self._outputs, width), dtype=kind, device=self._gpu.device)

    def _weights(self, kind: torch.dtype) -> list[Tensor]:
        if kind == torch.int8:
            return [self._bytes(-127, 128, kind, self._inputs) for _ in range(self._copies)]
        shape = (self._outputs, self._inputs)
        return [torch.randn(shape, device=self._gpu.device).to(kind) for _ in range(self._copies)]

    def _scales(self, *shape: int) -> Tensor:
        return torch.rand(*shape, device=self._gpu.device) * 0.01 + 1e-4

    def _int4(self) -> list[Work]:
        weights = [
            Int4Weight(
                packed=self._bytes(0, 256, torch.uint8, self._inputs // 2),
                scale=self._scales(self._outputs, self._inputs // GROUP).half().float(),
            )
            for _ in range(self._copies)
        ]
        return [partial(TritonLinear().pack(weight), self._x) for weight in weights]

    def _int8(self) -> list[Work]:
        weights = [
            Int8Weight(values=values, scale=self._scales(self._outputs, 1))
            for values in self._weights(torch.int8)
        ]
        return [partial(TritonLinear().pack(weight), self._x) for weight in weights]

    def _scaled(self, kind: torch.dtype, *, blocked: bool) -> list[Work]:
        if kind == torch.int8:
            left = torch.randint(-127, 128, self._x.shape, dtype=kind, device=self._gpu.device)
        else:
            left = self._x.to(kind)
        blocks = -(-self._inputs // 128)
        x_scale = self._scales(self._rows, blocks) if blocked else self._scales(self._rows)
        weight_scale = (
            self._scales(-(-self._outputs // 128), blocks) if blocked else self._scales(self._outputs)
        )
        return [
            lambda weight=weight: scaled_product(left, x_scale, weight, weight_scale, dtype=self._gpu.dtype)
            for weight in self._weights(kind)
        ]

    def _torch_scaled(self, *, by_row: bool) -> list[Work]:
        left, one = self._x.to(torch.float8_e4m3fn), torch.ones((), device=self._gpu.device)
        # The products that the engine takes, without the rounding of their inputs.
        scale_a, scale_b = (
            (self._scales(self._rows, 1), self._scales(1, self._outputs)) if by_row else (one, one)
        )
        return [
            lambda weight=weight: torch._scaled_mm(
                left,
                weight.T,
                scale_a=scale_a,
                scale_b=scale_b,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )
            for weight in self._weights(torch.float8_e4m3fn)
        ]

    def _invariant(self) -> list[Work]:
        return [
            lambda weight=weight: dense_product(self._x, weight) for weight in self._weights(self._gpu.dtype)
        ]
