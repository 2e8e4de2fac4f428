"""Paged attention on the CPU: native kernels beside the torch back end, and what the machine gives.

`python -m benchmarks.kernels.attention_cpu [--threads N] [--baseline LIBRARY] [--output FILE]`

Shapes of a 0.6 B model (16 query heads, 8 kv heads of 128) and of a 40 M one (8, 4 of 64). "cold" cases go
through as many layers' caches as do not fit into the last-level cache, as steps of a large model do. Decode
is judged by the bytes of keys and values that a step must read, prefill by the operations that causality
leaves. Best of a few runs; what a machine's memory gives changes from minute to minute, so cold cases take
turns with plain reading of the same tensors from end to end. A baseline is a library of the same level from
another checkout, LEVEL-….so as `kernels.native.build` prints it; it takes turns with this one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers.roofline import measure_machine
from kernels.attention import AttentionOptions, NativeAttention, RaggedBatch, TiledAttention
from kernels.native import NativeLibrary, Op, load_native
from kernels.native.mirror import structure
from kernels.paged_cache import LayerCache, allocate_layer
from services.bench.report import machine

BLOCK = 16
CPU = torch.device("cpu")
BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.int8: 1}
# Keys and values of a cold case.
COLD_BYTES = 600 << 20


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Heads of one layer."""

    heads: int
    kv_heads: int
    dim: int


LARGE, SMALL = Shape(heads=16, kv_heads=8, dim=128), Shape(heads=8, kv_heads=4, dim=64)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step: histories, new tokens of each sequence, and how many first tokens all of them share."""

    name: str
    lengths: list[int]
    new: list[int]
    dtype: torch.dtype = torch.bfloat16
    shape: Shape = LARGE
    shared: int = 0
    cold: bool = False
    by_torch: bool = False

    @property
    def kv_bytes(self) -> int:
        """Of keys and values that a layer of the step reads once."""
        tokens = self.shared + sum(length - self.shared for length in self.lengths)
        return 2 * tokens * self.shape.kv_heads * self.shape.dim * BYTES[self.dtype]


def decode(name: str, count: int, length: int, **options: Any) -> Case:
    """One new token for each of `count` sequences."""
    return Case(
        name=f"decode, {count} x {length}{name}", lengths=[length] * count, new=[1] * count, **options
    )


CASES = [
    decode("", 1, 2048, by_torch=True),
    decode("", 8, 256),
    decode("", 32, 256),
    decode("", 32, 320, by_torch=True),
    decode(", cold", 32, 320, cold=True),
    decode(", cold", 8, 320, cold=True),
    decode(", cold", 8, 4096, cold=True),
    decode(", cold, int8", 32, 320, cold=True, dtype=torch.int8),
    decode(", cold, int8", 8, 4096, cold=True, dtype=torch.int8),
    decode(", int8", 32, 320, dtype=torch.int8),
    decode(", float32", 32, 320, dtype=torch.float32),
    decode(", heads of 64", 32, 320, shape=SMALL),
    decode(", heads of 64", 64, 320, shape=SMALL),
    decode(", 1024 shared", 16, 1104, shared=1024, by_torch=True),
    decode(", 1024 shared, int8", 16, 1104, shared=1024, dtype=torch.int8),
    Case(name="prefill, 2048", lengths=[2048], new=[2048], by_torch=True),
    Case(name="prefill, 256 after 1792", lengths=[2048], new=[256]),
    Case(name="prefill, 16 x 64 after 1024 shared", lengths=[1088] * 16, new=[64] * 16, shared=1024),
    Case(name="prefill, 2048, heads of 64", lengths=[2048], new=[2048], shape=SMALL),
    Case(name="prefill, 512, int8", lengths=[512], new=[512], dtype=torch.int8),
    Case(name="prefill, 2048, int8", lengths=[2048], new=[2048], dtype=torch.int8),
    Case(name="prefill, 2048, float32", lengths=[2048], new=[2048], dtype=torch.float32),
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
    # Of plain reading in turns with a cold case.
    plain_gb_per_s: float | None = None
    # Of the baseline's library, in turns.
    baseline_ms: float | None = None


def make_cache(case: Case) -> tuple[LayerCache, np.ndarray]:
    """A layer's cache with every history in scattered blocks, and block tables."""
    counts = [-(-length // BLOCK) for length in case.lengths]
    cache = allocate_layer(
        num_blocks=sum(counts),
        block_size=BLOCK,
        num_heads=case.shape.kv_heads,
        key_dim=case.shape.dim,
        value_dim=case.shape.dim,
        shared_value_dim=0,
        dtype=case.dtype,
        device=CPU,
    )
    some = torch.randn(case.shape.kv_heads, BLOCK, case.shape.dim) * 0.1
    for tensor in cache.tensors():
        if tensor.is_floating_point():
            tensor.copy_(some[..., : tensor.shape[3]].abs() if tensor.shape[3] == 2 else some)
        else:
            tensor.copy_((some * 300).clamp(-127, 127).to(torch.int8).view(tensor.dtype))
    scattered = np.random.default_rng(0).permutation(sum(counts))
    tables = np.zeros((len(counts), max(counts)), np.int64)
    for row, count in enumerate(counts):
        tables[row, :count] = scattered[sum(counts[:row]) :][:count]
        tables[row, : case.shared // BLOCK] = tables[0, : case.shared // BLOCK]
    return cache, tables


def best_in_turns(*works: Callable[[], object], seconds: float = 1.0) -> list[float]:
    """Milliseconds of the fastest run of each, one after the other as often as fits into `seconds`."""
    best, began = [float("inf")] * len(works), time.perf_counter()
    while time.perf_counter() - began < seconds:
        for index, work in enumerate(works):
            start = time.perf_counter()
            work()
            best[index] = min(best[index], time.perf_counter() - start)
    return [1e3 * value for value in best]


def best_of(work: Callable[[], object], *, seconds: float = 0.3) -> float:
    """Milliseconds of the fastest of as many runs as fit into `seconds`, at least three."""
    best, count, began = float("inf"), 0, time.perf_counter()
    while count < 3 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
        count += 1
    return 1e3 * best


def measure(case: Case, num_threads: int, baseline: NativeLibrary | None = None) -> Result:
    """Runs one case on both back ends, and on another library's kernels."""
    shape = case.shape
    num_layers = -(-COLD_BYTES // case.kv_bytes) if case.cold else 1
    layers = [make_cache(case) for _ in range(num_layers)]
    q = torch.randn(-(-sum(case.new) // 16) * 16, shape.heads, shape.dim)
    batch = RaggedBatch(
        query_starts=np.concatenate(([0], np.cumsum(case.new))),
        context_lens=np.array(case.lengths),
        block_tables=layers[0][1],
        block_size=BLOCK,
    )
    options = AttentionOptions(scale=shape.dim**-0.5)
    heads: dict[str, Any] = {"num_heads": shape.heads, "num_kv_heads": shape.kv_heads}

    def step_of(backend: Any) -> Callable[[], None]:
        plan = backend.plan(batch, CPU)

        def step() -> None:
            for cache, _ in layers:
                backend.run(plan, q, cache, options)

        return step

    def timed(backend: NativeAttention | TiledAttention) -> float:
        return best_of(step_of(backend)) / num_layers

    native, plain, baseline_ms = NativeAttention(**heads, num_threads=num_threads), None, None
    if baseline is not None:
        other = NativeAttention(**heads, num_threads=num_threads, library=baseline)
        native_ms, baseline_ms = (ms / num_layers for ms in best_in_turns(step_of(native), step_of(other)))
    elif case.cold:
        tensors = [tensor for cache, _ in layers for tensor in cache.tensors()]
        times = best_in_turns(step_of(native), lambda: read_plainly(native, tensors))
        native_ms = times[0] / num_layers
        plain = sum(tensor.nbytes for tensor in tensors) / times[1] / 1e6
    else:
        native_ms = timed(native)
    torch_ms = timed(TiledAttention(**heads)) if case.by_torch else None
    unshared = timed(NativeAttention(**heads, num_threads=num_threads, share=False)) if case.shared else None
    pairs = sum(n * (length - n) + n * (n + 1) / 2 for length, n in zip(case.lengths, case.new, strict=True))
    return Result(
        case=case.name,
        native_ms=native_ms,
        torch_ms=torch_ms,
        unshared_ms=unshared,
        read_gb_per_s=case.kv_bytes / native_ms / 1e6,
        gflop_per_s=4 * shape.heads * shape.dim * pairs / native_ms / 1e6,
        plain_gb_per_s=plain,
        baseline_ms=baseline_ms,
    )


def read_plainly(native: NativeAttention, tensors: list[torch.Tensor]) -> None:
    """Reads tensors from end to end with the kernels' threads."""
    args = [structure("StreamArgs")(data=tensor.data_ptr(), bytes=tensor.nbytes, sum=0) for tensor in tensors]
    native.library.run([Op(native.library, "stream", arg) for arg in args], num_threads=native.num_threads)


def read_cached_bytes_per_s(num_bytes: int = 64 << 20) -> float:
    """Of a buffer that stays in the last-level cache, where the machine has one so large."""
    buffer = torch.ones(num_bytes // 8, dtype=torch.float64)
    return 1e3 * num_bytes / best_of(buffer.sum, seconds=0.3)


def main() -> int:
    """Prints a line per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=0, help="0 is one per core")
    parser.add_argument("--output", type=Path, help="write the figures there")
    parser.add_argument("--baseline", type=Path, help="a library of another checkout")
    arguments = parser.parse_args()
    baseline = arguments.baseline and NativeLibrary("baseline", arguments.baseline)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    num_threads = torch.get_num_threads()
    rates = measure_machine()
    read, gemm = rates.read_bytes_per_s / 1e9, rates.bfloat16_flops_per_s / 1e9
    cached = read_cached_bytes_per_s() / 1e9
    print(
        f"{num_threads} threads; memory reads {read:.1f} GB/s, 64 MiB again and again {cached:.1f} GB/s, "
        f"bfloat16 products reach {gemm:.0f} GFLOP/s"
    )
    names = ("native ms", "torch ms", "unshared", "baseline")
    print(" " * 36 + "".join(f"{name:>10}" for name in names) + f"{'GB/s':>8}{'plain':>8}{'GFLOP/s':>9}")
    results = []
    for case in CASES:
        result = measure(case, num_threads, baseline)
        results.append(result)
        torch_ms, unshared, before, plain = (
            "" if value is None else f"{value:.2f}"
            for value in (result.torch_ms, result.unshared_ms, result.baseline_ms, result.plain_gb_per_s)
        )
        print(
            f"{result.case:36}{result.native_ms:10.2f}{torch_ms:>10}{unshared:>10}{before:>10}"
            f"{result.read_gb_per_s:8.1f}{plain:>8}{result.gflop_per_s:9.0f}",
            flush=True,
        )
    if arguments.output:
        cached_rate = {"cached_read_bytes_per_s": cached * 1e9}
        report = {"machine": machine() | asdict(rates) | cached_rate, "threads": num_threads}
        report["level"] = load_native().level
        report["results"] = [asdict(result) for result in results]
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
