"""bfloat16 weights in 12 bits beside the same in 16, in turns within one process.

`python -m benchmarks.kernels.float12_cpu [--shapes 4096,1024 …] [--rows 1 …] [--json FILE]`: the best time of
each on weights that come from memory, at this machine's best level. GB/s count two bytes a weight on
both sides, so that they say how many weights pass. 16 bits are the baseline.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.engine.report import publish
from benchmarks.kernels.cpu import MANY_ROWS, ROWS
from benchmarks.kernels.levels_cpu import FOOTPRINT_BYTES, SHAPES, best_seconds
from kernels.linear.formats import DenseWeight
from kernels.linear.native import NativePacker
from kernels.native.build import machine_levels
from kernels.native.library import load_level


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--json", type=Path, default=None, help="write the figures there as well")
    options = parser.parse_args()
    library = load_level(machine_levels()[-1])
    threads = library.num_threads()
    table: list[dict[str, str | float | int]] = []
    for outputs, inputs in (map(int, shape.split(",")) for shape in options.shapes):
        copies = max(2, FOOTPRINT_BYTES // (2 * outputs * inputs))
        weight = DenseWeight(values=torch.randn(outputs, inputs).bfloat16())
        packers = [NativePacker(library, num_threads=threads, float12=float12) for float12 in (False, True)]
        packed = [[packer.pack(weight) for _ in range(copies)] for packer in packers]
        for rows in options.rows:
            used = [weights if rows < MANY_ROWS else weights[:2] for weights in packed]
            best = best_seconds([library, library], used, rows, threads)
            row: dict[str, str | float | int] = {"outputs": outputs, "inputs": inputs, "rows": rows}
            for name, seconds in zip(("16 bits", "12 bits"), best, strict=True):
                row[f"{name} GB/s"] = 2 * outputs * inputs / seconds / 1e9
                row[f"{name} GFLOP/s"] = 2 * rows * outputs * inputs / seconds / 1e9
            table.append(row | {"times faster": best[0] / best[1]})
    publish("Products of bfloat16 weights in 12 bits", table, options.json)


if __name__ == "__main__":
    main()
