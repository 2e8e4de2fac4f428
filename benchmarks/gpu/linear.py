"""Matrix products of the shapes of Llama-3.1-8B: bfloat16 by torch, and the quantized ones of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.device import Gpu, Roofs, Work
from benchmarks.gpu.report import Report
from engine.kernels.linear.formats import Int4Weight, Int8Weight
from engine.kernels.linear.triton_dense import dense_product
from engine.kernels.linear.triton_linear import scaled_product, weight_only_product

TITLE = "Matrix products"
# Outputs and inputs: the stacked projections, the way out of attention, gate and up, down.
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
GROUP = 128


def run(gpu: Gpu, report: Report) -> None:
    """Decode batches and a prompt, each weight format beside bfloat16."""
    roofs = gpu.roofs()
    report.fact(**roofs.fields())
    shapes = gpu.pick(SHAPES, {"tiny": (64, 256)})
    for rows in gpu.pick([1, 16, 128, 8192], [5]):
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
    for kind, (works, weight_bytes) in _formats(gpu, x, outputs, inputs, copies).items():
        try:
            timing = gpu.time(works())
        except Exception as error:
            report.row(**row, by=kind, failed=f"{type(error).__name__}: {str(error)[:300]}")
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


def _formats(
    gpu: Gpu, x: Tensor, outputs: int, inputs: int, copies: int
) -> dict[str, tuple[Callable[[], list[Work]], float]]:
    """Name to the products (made when they are asked for) and the bytes of a weight."""
    device, size, rows = gpu.device, outputs * inputs, x.shape[0]

    def bytes_of(low: int, high: int, kind: torch.dtype, width: int = inputs) -> Tensor:
        return torch.randint(low, high, (outputs, width), dtype=kind, device=device)

    def scales(*shape: int) -> Tensor:
        return torch.rand(*shape, device=device) * 0.01 + 1e-4

    def int4() -> list[Work]:
        weights = [
            Int4Weight(
                packed=bytes_of(0, 256, torch.uint8, inputs // 2), scale=scales(outputs, inputs // GROUP)
            )
            for _ in range(copies)
        ]
        return [lambda weight=weight: weight_only_product(x, weight) for weight in weights]

    def int8() -> list[Work]:
        weights = [
            Int8Weight(values=bytes_of(-127, 128, torch.int8), scale=scales(outputs, 1))
            for _ in range(copies)
        ]
        return [lambda weight=weight: weight_only_product(x, weight) for weight in weights]

    def scaled(kind: torch.dtype, *, blocked: bool) -> Callable[[], list[Work]]:
        def make() -> list[Work]:
            if kind == torch.int8:
                left = torch.randint(-127, 128, x.shape, dtype=kind, device=device)
                weights = [bytes_of(-127, 128, kind) for _ in range(copies)]
            else:
                left = x.to(kind)
                weights = [torch.randn(outputs, inputs, device=device).to(kind) for _ in range(copies)]
            x_scale = scales(rows, -(-inputs // 128)) if blocked else scales(rows)
            weight_scale = scales(-(-outputs // 128), -(-inputs // 128)) if blocked else scales(outputs)
            return [
                lambda weight=weight: scaled_product(left, x_scale, weight, weight_scale, dtype=gpu.dtype)
                for weight in weights
            ]

        return make

    def torch_scaled(*, by_row: bool) -> Callable[[], list[Work]]:
        def make() -> list[Work]:
            left, one = x.to(torch.float8_e4m3fn), torch.ones((), device=device)
            weights = [
                torch.randn(outputs, inputs, device=device).to(torch.float8_e4m3fn) for _ in range(copies)
            ]
            # The products that the engine takes, without the rounding of their inputs.
            scale_a, scale_b = (scales(rows, 1), scales(1, outputs)) if by_row else (one, one)
            return [
                lambda weight=weight: torch._scaled_mm(
                    left,
                    weight.T,
                    scale_a=scale_a,
                    scale_b=scale_b,
                    out_dtype=torch.bfloat16,
                    use_fast_accum=True,
                )
                for weight in weights
            ]

        return make

    def invariant() -> list[Work]:
        weights = [torch.randn(outputs, inputs, device=device).to(gpu.dtype) for _ in range(copies)]
        return [lambda weight=weight: dense_product(x, weight) for weight in weights]

    float8 = torch.float8_e4m3fn
    return {
        "W4A16": (int4, size / 2 + 4 * size / GROUP),
        "W8A16": (int8, float(size)),
        "W8A8": (scaled(torch.int8, blocked=False), float(size)),
        "fp8 by row": (scaled(float8, blocked=False), float(size)),
        "fp8 by 128x128": (scaled(float8, blocked=True), float(size)),
        "fp8 by tensor, torch._scaled_mm": (torch_scaled(by_row=False), float(size)),
        "fp8 by row, torch._scaled_mm": (torch_scaled(by_row=True), float(size)),
        "bf16, invariant": (invariant, 2.0 * size),
    }
