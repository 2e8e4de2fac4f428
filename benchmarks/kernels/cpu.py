"""Products over packed weights against torch's, and against what the machine's memory and units give.

`python -m benchmarks.kernels.cpu [--json FILE] [--threads N] [--weights FORM …] [--shapes N]`: first the read
bandwidth of all threads together, then for each shape and number of rows the time of ours and of torch's
bfloat16 product, the bytes of weights (and of their groups' scales) read per second and the arithmetic rate.
The share of the roofline is the least time that reading the weights or multiplying (at the best rate that any
product of that type, torch's among them, reached in this run) would take, over ours.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Iterator
from ctypes import c_int64
from functools import partial
from pathlib import Path

import torch

from benchmarks.engine.report import publish
from kernels.linear.formats import DenseWeight, Int4Weight, Int8Weight, WeightFormat
from kernels.linear.native import NativePacker
from kernels.linear.packed import gemm_args, make_workspace, product_ops
from kernels.native import NativeLibrary, Op, load_native
from kernels.native.library import Program
from kernels.native.mirror import structure

# (outputs, inputs): projections and head of the 0.6 B checkpoint, of the 40 M one, of an 8 B model, of none.
SHAPES = (
    *((4096, 1024), (6144, 1024), (1024, 2048), (1024, 3072), (151_936, 1024)),
    *((1024, 512), (3072, 512), (4096, 4096), (1720, 1344)),
)
INT4_GROUP = 64
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 512, 2048)
# From so many on, weights need not come from far.
MANY_ROWS = 512
# A head of so many outputs never has many rows.
HEAD_OUTPUTS = 100_000
# Copies of a weight, so that it comes from memory and not from a cache: last levels of 260 MB exist.
FOOTPRINT_BYTES = 768 << 20
REPEATS = 5
# A run that takes longer is not repeated.
LONG_S = 2.0


def best_seconds(run: Callable[[], object]) -> float:
    """The fastest of a few runs; the first touches everything."""
    found = float("inf")
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        run()
        took_s = time.perf_counter() - started
        found = min(found, took_s)
        if took_s > LONG_S:
            break
    return found


def read_bandwidth(library: NativeLibrary, threads: int) -> float:
    """Bytes per second that all threads read from a buffer far larger than the caches, on huge pages."""
    packer = NativePacker(library, num_threads=threads)
    num_bytes = 1 << 30
    address = packer.arena.take(num_bytes)
    ctypes.memset(address, 1, num_bytes)
    args = structure("StreamArgs")(address, num_bytes, 0)
    program = Program(library, [Op(library, "stream", args)])
    return num_bytes / best_seconds(lambda: program.run(library.pool(threads)))


def weights_of(outputs: int, inputs: int) -> dict[str, tuple[WeightFormat, float]]:
    """Each format with its bytes per weight, scales of groups included."""
    levels = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    scale = torch.rand(outputs, 1) / 64
    packed = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    return {
        "bfloat16": (DenseWeight(values=torch.randn(outputs, inputs).bfloat16()), 2.0),
        "w8a8": (Int8Weight(values=levels, scale=scale, activations="int8"), 1.0),
        "int8": (Int8Weight(values=levels, scale=scale), 1.0),
        "int4": (
            Int4Weight(packed=packed, scale=torch.rand(outputs, inputs // INT4_GROUP) / 8),
            0.5 + 4 / INT4_GROUP,
        ),
    }


def measure(
    library: NativeLibrary, weight: WeightFormat, copies: int, threads: int
) -> Iterator[tuple[int, float]]:
    """Each number of rows with the seconds of one product."""
    outputs, inputs = weight.shape
    packer = NativePacker(library, num_threads=threads)
    packed = [packer.pack(weight) for _ in range(copies)]
    for rows in ROWS:
        if rows >= MANY_ROWS and outputs >= HEAD_OUTPUTS:
            continue
        used = packed if rows < MANY_ROWS else packed[:2]
        x, out = torch.randn(rows, inputs), torch.empty(rows, outputs)
        workspace, count = make_workspace(library, rows, inputs, threads), c_int64(rows)
        pointers = (ctypes.addressof(count), x.data_ptr(), out.data_ptr(), workspace.ctypes.data)
        ops = [op for each in used for op in product_ops(library, gemm_args(each, *pointers))]
        program = Program(library, ops)
        yield rows, best_seconds(partial(program.run, library.pool(threads))) / len(used)


def measure_torch(outputs: int, inputs: int, copies: int, rows: int) -> float:
    """Seconds of torch's bfloat16 product."""
    weights = [torch.randn(outputs, inputs).bfloat16() for _ in range(copies)]
    x = torch.randn(rows, inputs).bfloat16()
    return best_seconds(lambda: [torch.nn.functional.linear(x, each) for each in weights]) / copies


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None, help="write the figures there as well")
    parser.add_argument("--threads", type=int, default=0, help="0: one per CPU")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only the first ones")
    parser.add_argument("--weights", nargs="+", default=[], help="only these formats")
    options = parser.parse_args()
    library = load_native()
    threads = library.num_threads(options.threads)
    torch.set_num_threads(threads)
    bandwidth = read_bandwidth(library, threads)
    found = []
    for outputs, inputs in SHAPES[: options.shapes]:
        for name, (weight, width) in weights_of(outputs, inputs).items():
            if options.weights and name not in options.weights:
                continue
            size = outputs * inputs * width
            copies = max(2, int(FOOTPRINT_BYTES / size))
            for rows, ours in measure(library, weight, copies, threads):
                few = max(1, copies // 4) if rows < MANY_ROWS else 2
                theirs = measure_torch(outputs, inputs, few, rows) if name == "bfloat16" else 0.0
                found.append((name, outputs, inputs, rows, size, ours, theirs))
    best = {
        name: max(2 * o * k * m / min(s, t or s) for n, o, k, m, _, s, t in found if n == name)
        for name, *_ in found
    }
    rows_out: list[dict[str, str | float | int]] = [
        {
            "weights": name,
            "outputs": outputs,
            "inputs": inputs,
            "rows": rows,
            "ours us": ours * 1e6,
            "torch bfloat16 us": theirs * 1e6,
            "read GB/s": size / ours / 1e9,
            "GFLOP/s": 2 * rows * outputs * inputs / ours / 1e9,
            "share of roofline": max(size / bandwidth, 2 * rows * outputs * inputs / best[name]) / ours,
        }
        for name, outputs, inputs, rows, size, ours, theirs in found
    ]
    rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in best.items())
    notes = (
        f"{_processor()}; read bandwidth of {threads} threads: {bandwidth / 1e9:.1f} GB/s; "
        f"level {library.level}; best GFLOP/s: {rates}"
    )
    publish("Products over packed weights", rows_out, options.json, notes)


if __name__ == "__main__":
    main()
