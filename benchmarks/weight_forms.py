"""What weights of a few bits gain on this machine's CPUs: bytes, and tokens per second that products allow.

    python -m benchmarks.weight_forms --json benchmarks/results/weight-forms.json

Every form has its own copy of the linear layers of a model of a billion parameters, cut to some of its layers
(--layers); what stands in them is random, as no time depends on it. The products of a step run one after
another, as in a program, and the tokens of a step over its time are the figure, for the whole model's number
of layers. Forms take turns in every round, so that what else the machine does meets all of them, and the best
round counts. Dense weights are bfloat16, which some processors read in 12 bits.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from ctypes import c_int64
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gguf import GGMLQuantizationType as Kind

from benchmarks.engine.report import options, publish
from engine.quantization.gguf_blocks import block_readers
from kernels.host import address_of
from kernels.linear.formats import WeightFormat
from kernels.linear.native import NativePacker
from kernels.linear.packed import PackedWeight, gemm_args, make_workspace, product_ops
from kernels.native.library import NativeLibrary, Program, load_native
from tests.kernels.drawn import float_coded_weight, weight_of
from tests.unit.engine.quantization.gguf_writer import drawn_blocks

# Outputs and inputs of a layer's products (Llama 3.2 1B), and how many layers there are.
PRODUCTS = ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192))
NUM_LAYERS = 16
GGUF = (
    *(Kind.Q8_0, Kind.Q6_K, Kind.Q5_K, Kind.Q4_K, Kind.Q3_K, Kind.Q2_K),
    *(Kind.IQ4_XS, Kind.IQ4_NL, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1),
)
# Dense weights as other programs have them.
SIXTEEN_BITS = "bfloat16 in 16 bits"
Draw = Callable[[int, int], WeightFormat]


def _gguf(kind: Kind) -> Draw:
    reader = block_readers(coded=True)[kind.name]
    return lambda outputs, inputs: reader(drawn_blocks(kind, outputs, inputs))


def _drawn(kind: str, group: int | None = None) -> Draw:
    return lambda outputs, inputs: weight_of(kind, outputs, inputs, group=group)


def forms() -> Iterator[tuple[str, Draw]]:
    """Names and weights; dense first, with which the others are compared."""
    yield "bfloat16", _drawn("bfloat16")
    yield SIXTEEN_BITS, _drawn("bfloat16")
    yield "fp8, a scale for each output", _drawn("fp8 kept")
    yield "fp8, blocks of 128", _drawn("fp8 kept blocks")
    yield "MXFP4", _drawn("coded 4 bits powers", 32)
    yield "NVFP4", _drawn("coded 4 bits floats", 16)
    yield "NF4", partial(float_coded_weight, group=64)
    for kind in GGUF:
        yield f"GGUF {kind.name}", _gguf(kind)


@dataclass(frozen=True)
class Packed:
    """A form's layers, and a step over each number of rows."""

    name: str
    num_bytes: int
    steps: dict[int, Program]


class Buffers:
    """What all steps share."""

    def __init__(self, library: NativeLibrary, rows: list[int], threads: int) -> None:
        most = max(rows)
        self.x = torch.randn(most, max(inputs for _, inputs in PRODUCTS))
        self.out = torch.empty(most, max(outputs for outputs, _ in PRODUCTS))
        self.counts = {count: c_int64(count) for count in rows}
        self.workspace = make_workspace(library, most, self.x.shape[1], threads)


def _packed(
    library: NativeLibrary, name: str, draw: Draw, layers: int, buffers: Buffers, threads: int
) -> Packed:
    packer = NativePacker(library, num_threads=threads, float12=name != SIXTEEN_BITS)
    drawn = [draw(outputs, inputs) for outputs, inputs in PRODUCTS]
    weights = [packer.pack(weight) for _ in range(layers) for weight in drawn]
    steps = {rows: Program(library, _ops(library, weights, buffers, rows)) for rows in buffers.counts}
    return Packed(name, sum(sum(weight.sizes.values()) for weight in weights), steps)


def _ops(library: NativeLibrary, weights: list[PackedWeight], buffers: Buffers, rows: int) -> list[Any]:
    ops: list[Any] = []
    for weight in weights:
        args = gemm_args(
            weight,
            ctypes.addressof(buffers.counts[rows]),
            buffers.x.data_ptr(),
            buffers.out.data_ptr(),
            address_of(buffers.workspace),
            x_stride=buffers.x.stride(0),
            out_stride=buffers.out.stride(0),
        )
        ops += product_ops(library, args, weight, buffers)
    return ops


def measure(layers: int, rows: list[int], rounds: int, threads: int, only: str) -> list[dict[str, Any]]:
    """One row for each form whose name holds `only`, and for dense weights."""
    library = load_native()
    buffers = Buffers(library, rows, threads)
    wanted = [(name, draw) for at, (name, draw) in enumerate(forms()) if at == 0 or only in name]
    packed = [_packed(library, name, draw, layers, buffers, threads) for name, draw in wanted]
    best = {(form.name, count): float("inf") for form in packed for count in rows}
    pool = library.pool(threads)
    for _ in range(rounds):
        for form in packed:
            for count, step in form.steps.items():
                start = time.perf_counter()
                step.run(pool)
                best[form.name, count] = min(best[form.name, count], time.perf_counter() - start)
    weights = layers * sum(outputs * inputs for outputs, inputs in PRODUCTS)
    table = []
    for form in packed:
        row: dict[str, Any] = {
            "form": form.name,
            "bits": round(8 * form.num_bytes / weights, 3),
            "MiB": round(form.num_bytes / layers * NUM_LAYERS / 2**20, 1),
        }
        for count in rows:
            per_s = count / (best[form.name, count] / layers * NUM_LAYERS)
            dense = count / (best[packed[0].name, count] / layers * NUM_LAYERS)
            row |= {f"tokens/s at {count}": round(per_s, 2), f"x dense at {count}": round(per_s / dense, 2)}
        table.append(row)
    return table


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--layers", type=int, default=4, help="layers in memory")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 256], help="tokens of a step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0, help="0 is one for each core")
    parser.add_argument("--only", default="", help="part of the names of the forms to measure")
    arguments = parser.parse_args()
    rows = measure(arguments.layers, arguments.rows, arguments.rounds, arguments.threads, arguments.only)
    title = f"Products of a model of {NUM_LAYERS} layers by the form of its weights ({load_native().level})"
    publish(title, rows, arguments.json)


if __name__ == "__main__":
    main()
