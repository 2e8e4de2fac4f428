"""What it costs to draw tokens on the CPU: the native op beside a full sort by torch.

`python -m benchmarks.kernels.sampling_cpu [--threads N] [--output FILE]`

32 rows of a vocabulary of 151,936, logits of a normal distribution (deviation 3). Best of a few runs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels.attention_cpu import best_of
from kernels.native import NativeLibrary, Op, load_native
from kernels.native.mirror import structure
from kernels.sampling.native import SAMPLE_ROW
from services.bench.report import machine

NUM_ROWS, VOCAB = 32, 151_936
CASES: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top-k 50": {"temperature": 1.0, "top_k": 50},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
}


def native_ms(library: NativeLibrary, logits: Tensor, num_threads: int, options: dict[str, float]) -> float:
    """Milliseconds of one draw for every row of logits [R, V]."""
    rows = np.zeros(NUM_ROWS, SAMPLE_ROW)
    rows["top_p"], rows["repetition"], rows["key"] = 1.0, 1.0, np.arange(NUM_ROWS)
    for name, value in options.items():
        rows[name] = value
    tokens, flags = np.zeros(NUM_ROWS, np.int64), np.zeros((2, NUM_ROWS), np.bool_)
    args = structure("SampleArgs")(
        logits=logits.data_ptr(),
        rows=rows.ctypes.data,
        tokens=tokens.ctypes.data,
        finite=flags[0].ctypes.data,
        allowed=flags[1].ctypes.data,
        num_rows=NUM_ROWS,
        vocab_size=VOCAB,
    )
    ops = [Op(library, "sample", args)]
    milliseconds = best_of(lambda: library.run(ops, num_threads=num_threads))
    assert flags.all(), "every row drew a token"
    return milliseconds


def main() -> int:
    """Prints a line per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=0, help="0 is one per core")
    parser.add_argument("--output", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    library, num_threads = load_native(), torch.get_num_threads()
    logits = torch.randn(NUM_ROWS, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    results = {name: native_ms(library, logits, num_threads, options) for name, options in CASES.items()}
    results["torch sorts"] = best_of(lambda: torch.sort(logits, descending=True))
    for name, milliseconds in results.items():
        print(f"{name:24}{milliseconds:10.2f} ms")
    if arguments.output:
        report = {"machine": machine(), "threads": num_threads, "milliseconds": results}
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
