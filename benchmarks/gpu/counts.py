"""Counts what products and layers of experts launch and read, from the launching functions themselves over
torch's "meta" device: no GPU, no clock.

`python -m benchmarks.gpu.counts [--only products|experts]` prints, for the layers of Llama-3.1-8B, programs,
how often these fill the processors of an H200, and bytes read of weights with their scales and of inputs,
beside bfloat16; and for a layer of Qwen3-30B-A3B the launches. A weight's bytes count for each tile of rows,
though all but the first may find them in the cache; inputs count once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.gpu.compile_ahead import AbsentGpu
from engine.model.experts import feed_sparse
from engine.model.records import Linear, SparseFeedForward
from kernels.experts.routing import Routing
from kernels.linear.formats import DenseWeight, Fp8Weight, Int4Weight, Int8Weight, WeightFormat
from kernels.linear.triton_backend import TritonLinear
from kernels.selection import Kernels

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS = (1, 16, 64, 128)
GROUP = 128
HIDDEN, INNER = 2048, 768
QWEN = Routing(num_experts=128, num_active=8)
# Operations that start nothing on a device.
VIEWS = {"view", "_unsafe_view", "reshape", "expand", "slice", "select", "transpose", "t", "detach", "empty"}


class Launched(TorchDispatchMode):
    """Notes what is launched: Triton's kernels with their grids, and torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[tuple[str, tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        if name not in VIEWS:
            self.operations.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def launched() -> Iterator[Launched]:
    """What is launched inside."""
    driver.set_active(AbsentGpu(90))
    found, run = Launched(), JITFunction.run

    def note(kernel: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.kernels.append((kernel.fn.__name__, grid, given, options))

    JITFunction.run = note
    try:
        with found:
            yield found
    finally:
        JITFunction.run = run


def meta(*shape: int, kind: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without contents."""
    return torch.empty(*shape, dtype=kind, device="meta")


def weights(outputs: int, inputs: int) -> dict[str, tuple[WeightFormat, float]]:
    """Each format, and the bytes of one weight with its scales."""
    groups = meta(outputs, inputs // GROUP, kind=torch.float32)
    bytes_ = meta(outputs, inputs, kind=torch.int8)
    packed = meta(outputs, inputs // 2, kind=torch.uint8)
    fp8 = bytes_.view(torch.float8_e4m3fn)
    blocks = meta(-(-outputs // 128), inputs // 128, kind=torch.float32)
    size, scales = outputs * inputs, 4.0 * outputs
    return {
        "int4": (Int4Weight(packed=packed, scale=groups), size / 2 + scales * inputs / GROUP),
        "int8": (Int8Weight(values=bytes_, scale=groups[:, :1]), size + scales),
        "w8a8": (Int8Weight(values=bytes_, scale=groups[:, :1], activations="int8"), size + scales),
        "fp8": (Fp8Weight(values=fp8, scale=groups[:, 0].contiguous()), size + scales),
        "fp8 128x128": (Fp8Weight(values=fp8, scale=blocks), size + 4.0 * blocks.numel()),
    }


def products() -> None:
    """A line for each layer, format and number of rows."""
    print(f"{'layer':9}{'format':13}{'rows':>5}{'launches':>9}{'programs':>9}{'waves':>7}", end="")
    print(f"{'tile':>9}{'parts':>6}{'MB read':>9}{'of bf16':>9}")
    for layer, (outputs, inputs) in SHAPES.items():
        for name, (weight, weight_bytes) in weights(outputs, inputs).items():
            product = TritonLinear().pack(weight)
            for rows in ROWS:
                with launched() as found:
                    product(meta(rows, inputs))
                _, grid, _, options = next(each for each in found.kernels if "quantize" not in each[0])
                # Rows of tiles read the weight once each.
                read = grid[0] * weight_bytes + 2.0 * rows * inputs
                programs = grid[0] * grid[1] * grid[2]
                plain = 2.0 * (outputs * inputs + rows * inputs)
                print(f"{layer:9}{name:13}{rows:5}{_count(found):9}{programs:9}", end="")
                print(f"{programs / PROCESSORS:7.1f}{options['TILE_M']:5}x{options['TILE_N']:<3}", end="")
                print(f"{options['PARTS']:6}{read / 1e6:9.1f}{read / plain:9.3f}")


def _count(found: Launched) -> int:
    return len(found.kernels) + len(found.operations)


def experts() -> None:
    """Launches of one layer of experts, by format, with their names."""
    # Nobody computes with another back end here.
    kernels: Kernels = None  # type: ignore[assignment]
    router = Linear(weight=None, product=lambda x, bias=None: x @ meta(HIDDEN, 128, kind=torch.float32))
    up, down = (
        {"bf16": DenseWeight(values=meta(*shape))} for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    )
    for found, shape in ((up, (2 * INNER, HIDDEN)), (down, (HIDDEN, INNER))):
        found.update({name: weight for name, (weight, _) in weights(*shape).items()})
    for name in up:
        sparse = _layer(up[name], down[name], router)
        for rows in (1, 64, 4096):
            x = meta(rows, HIDDEN)
            with launched() as seen:
                feed_sparse(sparse, x, kernels)
            names = [kernel.removesuffix("_kernel") for kernel, *_ in seen.kernels]
            print(
                f"{name:13}{rows:5} rows{_count(seen):4} launches: torch {', '.join(seen.operations)}; ",
                end="",
            )
            print(f"Triton {', '.join(names)}")


def _layer(up: WeightFormat, down: WeightFormat, router: Linear) -> SparseFeedForward:
    from kernels.experts.grouped import ExpertsTogether

    linear = TritonLinear()
    gate_up, out = (linear.grouped([weight] * QWEN.num_experts) for weight in (up, down))
    assert gate_up is not None, "of one format"
    assert out is not None, "of one format"
    return SparseFeedForward(
        spec=QWEN,  # type: ignore[arg-type]
        router=router,
        correction=None,
        experts=[],
        activation="silu",
        shared=None,
        together=ExpertsTogether(gate_up, out),
    )


PROCESSORS = 132
PARTS: dict[str, Callable[[], None]] = {"products": products, "experts": experts}


def main() -> None:
    """Prints both tables, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=sorted(PARTS))
    only = parser.parse_args().only
    for name, part in PARTS.items():
        if only in (None, name):
            part()


if __name__ == "__main__":
    main()
