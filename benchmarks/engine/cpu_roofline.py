"""Steps and prompts on a CPU, beside what the machine's memory and units allow at the same level.

For each number of rows a step in which so many sequences decode, and prompts of 512 and 2,048 tokens, each by
the real loop, scheduler and runner over random weights (`cpu_step`). "read" is the time of the weights and of
the cached keys and values at the rate at which memory was read, "multiply" that of all operations,
attention's included, at the rate of the fastest product; the share is that of the longer in the median step
(of the shortest prompt). Rates are the better of two measurements, just before and just after, as what a
virtual machine's memory gives changes from minute to minute; torch is held to the level, too. "native %" is
the part of a step inside the kernels. Weights that fit a cache are read faster than memory is: the 0.6 B
checkpoint's do not. The second table is what a prompt adds to the steps of answers beside which it is
computed, and the same prompt alone: 100 % and more where both together are no dearer than their parts
(medians of turns back and forth). NATIVE_KERNELS_LEVEL forces a level below the machine's best. "others" says
how many CPUs other programs took meanwhile: above 0.05, measure again. Lines tell what was found as it goes.
Needs what `make dev` installs: transformers makes the checkpoint.

    python -m benchmarks.engine.cpu_roofline [--checkpoint qwen3-0.6b] [--ours bf16] [--rows 1 4 8 16 32 64]
        [--prompts 512 2048] [--context 64] [--mixed 8+64 8+256 32+256] [--environments DIR] [--json OUT]
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.engine.cpu_step import RATE_ROWS, Bench, require_transformers
from benchmarks.engine.report import Row, publish
from benchmarks.peers.checkpoints import SHAPES, attention_operations, kv_values_per_token, matrix_parameters
from benchmarks.peers.levels import hold_this_process
from benchmarks.peers.roofline import Machine, Precision, measure_machine
from benchmarks.peers.tables import OURS, precision_of

_NUM_TOKENS = 24
# A decode step's runs end, and no further prompt begins, once they have taken so long.
_RUNS_S = 4.0
# Prompts in one run of answers, and runs with and without them.
_NUM_CHUNKS = 4
_MIXED_TURNS = 3


def _step(bench: Bench, rows: int, context: int) -> Row:
    """Milliseconds of a step in which so many sequences decode, in the median of one run or more."""
    bench.watch.parts = defaultdict(list)
    began, others = time.perf_counter(), 0.0
    while not bench.watch.parts["step"] or time.perf_counter() - began < _RUNS_S / 2:
        others = max(others, bench.run(rows, context, _NUM_TOKENS)[1])
    step_ms, native_ms = (1e3 * median(bench.watch.parts[part]) for part in ("step", "native"))
    return {
        "work": f"step of {rows}",
        "rows": rows,
        "context": round(median(bench.watch.parts["context"])),
        "ms": step_ms,
        "native %": 100 * native_ms / step_ms,
        "others": round(others, 2),
    }


def _prompt(bench: Bench, num_tokens: int) -> Row:
    """Milliseconds from a prompt to its token, the shortest of two runs or more."""
    runs: list[tuple[float, float, float]] = []
    began = time.perf_counter()
    while len(runs) < 2 or time.perf_counter() - began < _RUNS_S:
        before = bench.watch.total_s["native"]
        seconds, others = bench.run(1, num_tokens, 1)
        runs.append((seconds, bench.watch.total_s["native"] - before, others))
    seconds, native_s, _ = min(runs)
    return {
        "work": f"prompt of {num_tokens}",
        "rows": num_tokens,
        "context": 0,
        "ms": 1e3 * seconds,
        "native %": 100 * native_s / seconds,
        "others": round(max(others for *_, others in runs), 2),
    }


def _mixed(bench: Bench, rows: int, context: int, chunk: int) -> Row:
    """Milliseconds that a prompt adds to steps in which so many sequences decode, and those of it alone."""
    together, alone = [], []
    for _ in range(_MIXED_TURNS):
        answers_s, both_s = (
            bench.beside(rows, context, _NUM_TOKENS, chunk, count) for count in (0, _NUM_CHUNKS)
        )
        together.append((both_s - answers_s) / _NUM_CHUNKS)
        alone.append(median(bench.run(1, chunk, 1)[0] for _ in range(3)))
    added_ms, alone_ms = 1e3 * median(together), 1e3 * median(alone)
    return {
        "work": f"prompt of {chunk} beside {rows}",
        "context": context,
        "added ms": added_ms,
        "baseline: alone ms": alone_ms,
        "share %": 100 * alone_ms / added_ms,
    }


def _beside(row: Row, machine: Machine, checkpoint: str, precision: Precision) -> Row:
    """The row with what the machine's rates allow."""
    rows, context, ms = int(row["rows"]), int(row["context"]), float(row["ms"])
    parameters = matrix_parameters(checkpoint)
    head = int(SHAPES[checkpoint]["vocab_size"] * SHAPES[checkpoint]["hidden_size"])
    if context:
        products = 2 * parameters * rows
        # One token sees all of its context, twice what a prompt of that length does on average.
        attention = 2 * attention_operations(checkpoint, context) * rows // context
        kv_values = kv_values_per_token(checkpoint) * context * rows
    else:
        products = 2 * (parameters - head) * rows + 2 * head
        attention, kv_values = attention_operations(checkpoint, rows), 0
    num_bytes = parameters * precision.weight_bytes + kv_values * precision.kv_bytes
    read_ms = 1e3 * num_bytes / machine.read_bytes_per_s
    multiply_ms = 1e3 * (products / precision.flops_per_s(machine) + attention / machine.bfloat16_flops_per_s)
    shown = {name: value for name, value in row.items() if name not in {"rows", "others"}}
    return shown | {
        "baseline: read ms": read_ms,
        "baseline: multiply ms": multiply_ms,
        "share %": 100 * max(read_ms, multiply_ms) / ms,
        "GB/s": num_bytes / ms / 1e6,
        "of GB/s": machine.read_bytes_per_s / 1e9,
        "GFLOP/s": (products + attention) / ms / 1e6,
        "of GFLOP/s": precision.flops_per_s(machine) / 1e9,
        "others": row["others"],
    }


def _pair(text: str) -> tuple[int, int]:
    rows, _, chunk = text.partition("+")
    return int(rows), int(chunk)


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--checkpoint", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--ours", choices=sorted(OURS), default="bf16")
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--prompts", nargs="*", type=int, default=[512, 2048])
    parser.add_argument("--context", type=int, default=64, help="tokens of a sequence before its first step")
    parser.add_argument(
        "--mixed",
        nargs="*",
        type=_pair,
        default=[(8, 64), (8, 256), (32, 256)],
        help="answers+tokens of a prompt",
    )
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    require_transformers(parser)
    folder = arguments.environments.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()

    def tell(*said: object) -> None:
        print(f"{time.perf_counter() - began:4.0f} s", *said, flush=True)

    hold_this_process()
    tell("compiling kernels if need be, measuring memory and products, making the checkpoint in", folder)
    before = measure_machine(rows=RATE_ROWS)
    tell(f"memory reads {before.read_bytes_per_s / 1e9:.1f} GB/s")
    bench = Bench(arguments.checkpoint, arguments.ours, folder)
    gc.collect()
    gc.freeze()
    precision = precision_of(f"millrace-{arguments.ours}")
    rows: list[Row] = []
    bench.run(1, 16, 4)
    works = [partial(_prompt, bench, count) for count in arguments.prompts]
    works += [partial(_step, bench, count, arguments.context) for count in arguments.rows]
    for work in works:
        found = work()
        after = measure_machine(rows=RATE_ROWS)
        rows.append(_beside(found, before.best(after), arguments.checkpoint, precision))
        tell(f"{rows[-1]['work']}: {rows[-1]['ms']:.4g} ms, {rows[-1]['share %']:.0f} %")
        before = after
    notes = f"{arguments.checkpoint}, {arguments.ours}, level {bench.level}, {os.cpu_count()} CPUs"
    publish("Steps and prompts beside the machine's rates", rows, arguments.json, notes)
    mixed: list[Row] = []
    for count, chunk in arguments.mixed:
        mixed.append(_mixed(bench, count, arguments.context, chunk))
        tell(mixed[-1])
    mixed_json = arguments.json and arguments.json.with_stem(f"{arguments.json.stem}_mixed")
    publish("Prompts beside answers", mixed, mixed_json, notes)
    bench.runner.close()


if __name__ == "__main__":
    main()
