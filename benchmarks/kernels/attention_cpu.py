"""Paged attention on the CPU: native kernels beside the torch back end, and what the machine's memory gives.

`python -m benchmarks.kernels.attention_cpu [--threads N] [--output FILE]`

One layer of the shape of a 0.6 B model (16 query heads, 8 kv heads of 128). Decode is judged by the bytes of
keys and values that a step must read, prefill by the operations that causality leaves. Best of a few runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.peers.roofline import measure_machine
from engine.kernels.attention import AttentionOptions, NativeAttention, RaggedBatch, TiledAttention
from engine.kernels.paged_cache import LayerCache, allocate_layer
from services.bench.report import machine

HEADS, KV_HEADS, DIM, BLOCK = 16, 8, 128, 16
CPU = torch.device("cpu")
BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.int8: 1}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step: histories, new tokens of each sequence, and how many first tokens all of them share."""

    name: str
    lengths: list[int]
    new: list[int]
    dtype: torch.dtype = torch.bfloat16
    shared: int = 0
    by_torch: bool = True


CASES = [
    Case(name="decode, 1 x 8192", lengths=[8192], new=[1]),
    Case(name="decode, 8 x 8192", lengths=[8192] * 8, new=[1] * 8),
    Case(name="decode, 8 x 8192, int8", lengths=[8192] * 8, new=[1] * 8, dtype=torch.int8),
    Case(name="decode, 4 x 8192, float32", lengths=[8192] * 4, new=[1] * 4, dtype=torch.float32),
    Case(name="decode, 32 x 320", lengths=[320] * 32, new=[1] * 32),
    Case(name="decode, 16 x 1104, 1024 shared", lengths=[1104] * 16, new=[1] * 16, shared=1024),
    Case(name="prefill, 2048", lengths=[2048], new=[2048]),
    Case(name="prefill, 2048, float32", lengths=[2048], new=[2048], dtype=torch.float32, by_torch=False),
]


@dataclass(frozen=True, kw_only=True)
class Result:
    """Times in milliseconds; the rates are those of the native kernels."""

    case: str
    native_ms: float
    torch_ms: float | None
    # Without computing shared blocks together; None where nothing is shared.
    unshared_ms: float | None
    read_gb_per_s: float
    gflop_per_s: float


def make_cache(case: Case) -> tuple[LayerCache, np.ndarray]:
    """A layer's cache with every history in scattered blocks, and block tables."""
    counts = [-(-length // BLOCK) for length in case.lengths]
    cache = allocate_layer(
        num_blocks=sum(counts),
        block_size=BLOCK,
        num_heads=KV_HEADS,
        key_dim=DIM,
        value_dim=DIM,
        shared_value_dim=0,
        dtype=case.dtype,
        device=CPU,
    )
    some = torch.randn(BLOCK * KV_HEADS, DIM)
    for tensor in cache.tensors():
        if tensor.is_floating_point():
            tensor.copy_(some[:, : tensor.shape[3]].view(KV_HEADS, BLOCK, -1) * 0.1)
        else:
            tensor.random_(0, 100)
    scattered = np.random.default_rng(0).permutation(sum(counts))
    tables = np.zeros((len(counts), max(counts)), np.int64)
    for row, count in enumerate(counts):
        tables[row, :count] = scattered[sum(counts[:row]) :][:count]
        tables[row, : case.shared // BLOCK] = tables[0, : case.shared // BLOCK]
    return cache, tables


def best_of(work: Callable[[], object], *, seconds: float = 0.6) -> float:
    """Milliseconds of the fastest of as many runs as fit into `seconds`, at least three."""
    best, count, began = float("inf"), 0, time.perf_counter()
    while count < 3 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
        count += 1
    return 1e3 * best


def measure(case: Case, num_threads: int) -> Result:
    """Runs one case on both back ends."""
    cache, tables = make_cache(case)
    q = torch.randn(-(-sum(case.new) // 16) * 16, HEADS, DIM)
    batch = RaggedBatch(
        query_starts=np.concatenate(([0], np.cumsum(case.new))),
        context_lens=np.array(case.lengths),
        block_tables=tables,
        block_size=BLOCK,
    )
    options = AttentionOptions(scale=DIM**-0.5)
    heads = {"num_heads": HEADS, "num_kv_heads": KV_HEADS}

    def timed(backend: NativeAttention | TiledAttention) -> float:
        plan = backend.plan(batch, CPU)
        return best_of(lambda: backend.run(plan, q, cache, options))

    native_ms = timed(NativeAttention(**heads, num_threads=num_threads))
    torch_ms = timed(TiledAttention(**heads)) if case.by_torch else None
    unshared = timed(NativeAttention(**heads, num_threads=num_threads, share=False)) if case.shared else None
    tokens = case.shared + sum(length - case.shared for length in case.lengths)
    pairs = sum(n * (length - n) + n * (n + 1) / 2 for length, n in zip(case.lengths, case.new, strict=True))
    return Result(
        case=case.name,
        native_ms=native_ms,
        torch_ms=torch_ms,
        unshared_ms=unshared,
        read_gb_per_s=2 * tokens * KV_HEADS * DIM * BYTES[case.dtype] / native_ms / 1e6,
        gflop_per_s=4 * HEADS * DIM * pairs / native_ms / 1e6,
    )


def main() -> int:
    """Prints a line per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=0, help="0 is one per core")
    parser.add_argument("--output", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    num_threads = torch.get_num_threads()
    rates = measure_machine()
    read, gemm = rates.read_bytes_per_s / 1e9, rates.gemm_flops_per_s / 1e9
    print(f"{num_threads} threads; memory reads {read:.1f} GB/s, torch multiplies {gemm:.0f} GFLOP/s")
    print(f"{'':32}{'native ms':>10}{'torch ms':>10}{'unshared':>10}{'GB/s':>8}{'GFLOP/s':>9}")
    results = []
    for case in CASES:
        result = measure(case, num_threads)
        results.append(result)
        torch_ms, unshared = (
            "" if value is None else f"{value:.2f}" for value in (result.torch_ms, result.unshared_ms)
        )
        print(
            f"{result.case:32}{result.native_ms:10.2f}{torch_ms:>10}{unshared:>10}"
            f"{result.read_gb_per_s:8.1f}{result.gflop_per_s:9.0f}",
            flush=True,
        )
    if arguments.output:
        report = {"machine": machine() | asdict(rates), "threads": num_threads}
        report["results"] = [asdict(result) for result in results]
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
