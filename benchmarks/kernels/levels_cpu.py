"""Products of packed weights, one level of the native kernels beside another, in turns within one process.

`python -m benchmarks.kernels.levels_cpu [--levels LEVEL …] [--weights bfloat16 …] [--shapes 4096,1024 …]
[--rows 1 …] [--threads N] [--json FILE]`: the best time of each level (this machine's best two) on weights
that come from memory; the first is the baseline. A level may be a library's path, LEVEL-….so as
`kernels.native.build` prints it in another checkout: one level before a change and after it.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from ctypes import c_int64
from pathlib import Path

import torch

from benchmarks.engine.report import publish
from benchmarks.kernels.cpu import MANY_ROWS, ROWS, weights_of
from kernels.linear.native import NativePacker
from kernels.linear.packed import PackedWeight, gemm_args, make_workspace, product_ops
from kernels.native import NativeLibrary
from kernels.native.build import machine_levels
from kernels.native.library import Program, load_level

# Projections and head of the 0.6 B checkpoint (outputs, inputs).
SHAPES = ("4096,1024", "6144,1024", "1024,2048", "1024,3072", "151936,1024")
FOOTPRINT_BYTES = 300 << 20
REPEATS = 4


def best_seconds(
    libraries: list[NativeLibrary], packed: list[list[PackedWeight]], rows: int, threads: int
) -> list[float]:
    """Seconds of one product by each library."""
    outputs, inputs = packed[0][0].outputs, packed[0][0].inputs
    x, out, count = torch.randn(rows, inputs), torch.empty(rows, outputs), c_int64(rows)
    programs, workspaces = [], []
    for library, weights in zip(libraries, packed, strict=True):
        workspace = make_workspace(library, rows, inputs, threads)
        pointers = (ctypes.addressof(count), x.data_ptr(), out.data_ptr(), workspace.ctypes.data)
        ops = [op for each in weights for op in product_ops(library, gemm_args(each, *pointers))]
        programs.append(Program(library, ops))
        workspaces.append(workspace)
    best = [float("inf")] * len(libraries)
    for turn in range(REPEATS + 1):
        for index, (library, program) in enumerate(zip(libraries, programs, strict=True)):
            started = time.perf_counter()
            program.run(library.pool(threads))
            seconds = (time.perf_counter() - started) / len(packed[index])
            # The first turn touches everything.
            best[index] = min(best[index], seconds) if turn else best[index]
    return best


def _library(name: str) -> NativeLibrary:
    """Of a level, or of a library's path."""
    path = Path(name)
    return NativeLibrary(path.name.partition("-")[0], path) if path.suffix == ".so" else load_level(name)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    known = machine_levels()
    parser.add_argument("--levels", nargs="+", default=known[-2:])
    parser.add_argument("--weights", nargs="+", default=["bfloat16"])
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--threads", type=int, default=0, help="0: one per CPU")
    parser.add_argument("--json", type=Path, default=None, help="write the figures there as well")
    options = parser.parse_args()
    libraries = [_library(level) for level in options.levels]
    names = [f"{library.level} {number}" for number, library in enumerate(libraries, 1)]
    threads = libraries[0].num_threads(options.threads)
    table: list[dict[str, str | float | int]] = []
    for outputs, inputs in (map(int, shape.split(",")) for shape in options.shapes):
        for form, (weight, width) in weights_of(outputs, inputs).items():
            if form not in options.weights:
                continue
            copies = max(2, int(FOOTPRINT_BYTES / (width * outputs * inputs)))
            packers = [NativePacker(library, num_threads=threads) for library in libraries]
            packed = [[packer.pack(weight) for _ in range(copies)] for packer in packers]
            for rows in options.rows:
                used = [weights if rows < MANY_ROWS else weights[:2] for weights in packed]
                best = best_seconds(libraries, used, rows, threads)
                row: dict[str, str | float | int] = {"weights": form, "outputs": outputs, "inputs": inputs}
                row["rows"] = rows
                for name, seconds in zip(names, best, strict=True):
                    row[f"{name} us"] = seconds * 1e6
                    row[f"{name} GFLOP/s"] = 2 * rows * outputs * inputs / seconds / 1e9
                    row[f"{name} GB/s"] = width * outputs * inputs / seconds / 1e9
                table.append(row | {"times faster": best[0] / best[-1]})
    built = (f"{name}: {library.path.stem}" for name, library in zip(names, libraries, strict=True))
    publish("Products by level", table, options.json, f"{threads} threads; {', '.join(built)}")


if __name__ == "__main__":
    main()
