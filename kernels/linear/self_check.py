"""Compares products with torch, in a process of its own: `python -m kernels.linear.self_check LEVEL`.

For instructions that a system may announce and yet not run (AMX): what dies or is wrong here is not used.
"""

from __future__ import annotations

import sys

import torch

from kernels.linear.formats import DenseWeight, Int4Weight, Int8Weight, WeightFormat
from kernels.linear.native import NativePacker, NativeProduct
from kernels.native.library import open_level

# Outputs, inputs: whole panels, a narrow last one, more than a block of inputs.
SHAPES = ((64, 64), (200, 320), (130, 4200))
ROWS = (1, 5, 16, 17, 33, 100)
# Inputs that share a scale, where they do.
GROUP = 64


def largest_error(level: str) -> float:
    """Largest difference to float64, relative to what rounding the inputs may cost; at most 1 when sound."""
    library = open_level(level)
    worst = 0.0
    for outputs, inputs in SHAPES:
        generator = torch.Generator().manual_seed(inputs)
        values = torch.randn(outputs, inputs, generator=generator)
        levels = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
        scale = torch.rand(outputs, 1, generator=generator) / 64
        weights: list[WeightFormat] = [
            DenseWeight(values=values.bfloat16()),
            Int8Weight(values=levels, scale=scale),
            Int8Weight(values=levels, scale=scale, activations="int8"),
        ]
        if inputs % GROUP == 0:
            groups = torch.rand(outputs, inputs // GROUP, generator=generator) / 64
            packed = torch.randint(0, 256, (outputs, inputs // 2), generator=generator, dtype=torch.uint8)
            weights.append(Int8Weight(values=levels, scale=groups))
            weights.append(Int4Weight(packed=packed, scale=groups * 8, minimum=-groups * 60))
        for weight in weights:
            product = NativeProduct(NativePacker(library, num_threads=2).pack(weight), num_threads=2)
            exact = weight.dequantize().double()
            for rows in ROWS:
                x = torch.randn(rows, inputs, generator=generator)
                error = (product(x) - x.double() @ exact.T).abs()
                # Half a level of int8, or 2^-9 of bfloat16, in every input.
                step = x.double().abs().amax(1, keepdim=True) / 250 + x.double().abs() * 2.0**-8
                allowed = step @ exact.abs().T + 1e-4
                worst = max(worst, float((error / allowed).max()))
    return worst


if __name__ == "__main__":
    error = largest_error(sys.argv[1])
    print(f"{sys.argv[1]}: {error:.3f} of the error that rounding allows")
    sys.exit(not error <= 1)
