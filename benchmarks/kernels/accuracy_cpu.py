"""What products of bfloat16 weights lose, at every level of this machine, beside torch's bfloat16 product.

`python -m benchmarks.kernels.accuracy_cpu [--json FILE]`: the root of the mean square of the error, in
thousandths of that of the exact results (float64), over random rows, rows of which one input is a thousand
times the others, and rows and weights of one sign. "rows rounded" is what rounding rows to bfloat16 costs by
itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.engine.report import arguments, publish
from kernels.linear.formats import DenseWeight
from kernels.linear.native import NativePacker, NativeProduct
from kernels.native.build import machine_levels
from kernels.native.library import load_level

ROWS, OUTPUTS = 96, 512
INPUTS = (1024, 3072, 8192)
KINDS = ("random", "one input 1,000 times the others", "of one sign")


def operands(kind: str, inputs: int) -> tuple[Tensor, Tensor]:
    """Rows [M, K] in float32 and weights [N, K] in bfloat16."""
    x, weight = torch.randn(ROWS, inputs), torch.randn(OUTPUTS, inputs)
    if kind == KINDS[1]:
        x[torch.arange(ROWS), torch.randint(0, inputs, (ROWS,))] *= 1000
    if kind == KINDS[2]:
        x, weight = x.abs(), weight.abs()
    return x, weight.bfloat16()


def row(kind: str, inputs: int) -> dict[str, str | float | int]:
    """Errors of one kind of operands."""
    x, weight = operands(kind, inputs)
    exact = x.double() @ weight.double().T

    def error(found: Tensor) -> float:
        return float(1000 * (found.double() - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())

    found: dict[str, str | float | int] = {
        "rows": kind,
        "inputs": inputs,
        "baseline: torch bfloat16": error(x.bfloat16() @ weight.T),
        "rows rounded": error(x.bfloat16().double() @ weight.double().T),
    }
    for level in machine_levels():
        packed = NativePacker(load_level(level), num_threads=1).pack(DenseWeight(values=weight))
        found[level] = error(NativeProduct(packed, num_threads=1)(x))
    return found


def main() -> None:
    """Measures and prints."""
    options = arguments(__doc__ or "")
    torch.manual_seed(0)
    rows = [row(kind, inputs) for kind in KINDS for inputs in INPUTS]
    publish("Errors of products of bfloat16 weights, in thousandths", rows, options.json)


if __name__ == "__main__":
    main()
