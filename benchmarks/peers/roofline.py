"""What the machine's memory and matrix units allow: the lower bound of a run's time.

A decode step reads all weights and the KV of every running sequence, and multiplies every weight with every
sequence's row; prompts cost two operations per parameter and token, and four per element of each key that a
token sees. All rates are measured in this run. The bfloat16 rate is that of the fastest of torch's product
and ours over weights of 16 and of 12 bits (which may multiply in float16, twice as fast as any product of
bfloat16); `Machine.by_torch` is the machine as torch's product alone shows it. int8 rows have a rate of their
own, attention does not. A bound is that of two bytes a bfloat16 weight, as the checkpoint has them, or of
those that our products read.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from ctypes import c_int64
from dataclasses import dataclass, replace

import torch

from benchmarks.peers.checkpoints import (
    SHAPES,
    attention_operations,
    kv_values_per_token,
    matrix_parameters,
)
from benchmarks.peers.loads import Load
from kernels.linear.formats import DenseWeight, Int8Weight, WeightFormat
from kernels.linear.native import NativePacker
from kernels.linear.packed import gemm_args, make_workspace, product_ops
from kernels.native.library import NativeLibrary, Op, Program, load_native
from kernels.native.mirror import structure

_REPEATS = 5
# A run that takes longer is not repeated.
_LONG_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Measured rates."""

    read_bytes_per_s: float
    bfloat16_flops_per_s: float
    int8_ops_per_s: float
    # Of torch's product; 0 in records that are older than this figure.
    torch_bfloat16_flops_per_s: float = 0.0
    # What our products read of a bfloat16 weight.
    read_bytes_per_bfloat16: float = 2.0

    def by_torch(self) -> Machine | None:
        """The same machine at the rate of torch's bfloat16 product; None where that is not known."""
        if not self.torch_bfloat16_flops_per_s:
            return None
        return replace(self, bfloat16_flops_per_s=self.torch_bfloat16_flops_per_s)

    def best(self, other: Machine) -> Machine:
        """The higher of each rate: whatever else runs can only lower them."""
        return Machine(
            read_bytes_per_s=max(self.read_bytes_per_s, other.read_bytes_per_s),
            bfloat16_flops_per_s=max(self.bfloat16_flops_per_s, other.bfloat16_flops_per_s),
            int8_ops_per_s=max(self.int8_ops_per_s, other.int8_ops_per_s),
            torch_bfloat16_flops_per_s=max(self.torch_bfloat16_flops_per_s, other.torch_bfloat16_flops_per_s),
            read_bytes_per_bfloat16=self.read_bytes_per_bfloat16,
        )


def best_seconds(run: Callable[[], object]) -> float:
    """The fastest of a few runs; the first touches everything."""
    found = float("inf")
    for _ in range(1 + _REPEATS):
        started = time.perf_counter()
        run()
        took_s = time.perf_counter() - started
        found = min(found, took_s)
        if took_s > _LONG_S:
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


def measure_machine(outputs: int = 6144, inputs: int = 1024, rows: int = 2048) -> Machine:
    """Reads a buffer far larger than the caches with all cores, and multiplies large matrices: the best of a
    few runs each. To be asked before and after a measurement (`Machine.best`).
    """
    library = load_native()
    threads = library.num_threads(0)
    torch.set_num_threads(threads)
    left, right = (torch.randn(size, inputs, dtype=torch.bfloat16) for size in (rows, outputs))
    torch_s = best_seconds(lambda: left @ right.T)
    levels = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    bytes_weight = Int8Weight(values=levels, scale=torch.rand(outputs, 1) / 64, activations="int8")
    ours_s = min(
        _product_s(library, DenseWeight(values=right), rows, threads, float12=float12)
        for float12 in (False, True)
    )
    num_operations = 2.0 * rows * outputs * inputs
    return Machine(
        read_bytes_per_s=read_bandwidth(library, threads),
        bfloat16_flops_per_s=num_operations / min(torch_s, ours_s),
        int8_ops_per_s=num_operations / _product_s(library, bytes_weight, rows, threads),
        torch_bfloat16_flops_per_s=num_operations / torch_s,
        read_bytes_per_bfloat16=1.5 if NativePacker(library).packs_float12 else 2.0,
    )


def _product_s(
    library: NativeLibrary, weight: WeightFormat, rows: int, threads: int, *, float12: bool = True
) -> float:
    """Best time of our product of so many rows."""
    outputs, inputs = weight.shape
    packed = NativePacker(library, num_threads=threads, float12=float12).pack(weight)
    x, out, count = torch.randn(rows, inputs), torch.empty(rows, outputs), c_int64(rows)
    workspace = make_workspace(library, rows, inputs, threads)
    args = gemm_args(packed, ctypes.addressof(count), x.data_ptr(), out.data_ptr(), workspace.ctypes.data)
    program = Program(library, product_ops(library, args))
    pool = library.pool(threads)
    return best_seconds(lambda: program.run(pool))


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes of a weight and of a KV value, and whether products take int8 rows."""

    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    int8_rows: bool = False

    def flops_per_s(self, machine: Machine) -> float:
        """The rate at which a machine multiplies in this precision."""
        return machine.int8_ops_per_s if self.int8_rows else machine.bfloat16_flops_per_s


def bound_tokens_per_s(machine: Machine, checkpoint: str, load: Load, precision: Precision) -> float:
    """Output tokens per second that no server can pass whose weights and KV have this precision."""
    parameters, rate = matrix_parameters(checkpoint), precision.flops_per_s(machine)
    head = int(SHAPES[checkpoint]["vocab_size"] * SHAPES[checkpoint]["hidden_size"])
    context = load.shared_tokens + load.input_tokens + load.output_tokens / 2
    # A prefix that all share is read once per step.
    own = context - load.shared_tokens
    kv_values = kv_values_per_token(checkpoint) * (load.shared_tokens + own * load.concurrency)
    read_s = (parameters * precision.weight_bytes + kv_values * precision.kv_bytes) / machine.read_bytes_per_s
    multiply_s = 2 * parameters * load.concurrency / rate
    # The first token comes with the prompt.
    steps = (load.output_tokens - 1) * load.num_requests / load.concurrency
    prompt_tokens = load.input_tokens * load.num_requests + load.shared_tokens
    attention = attention_operations(checkpoint, load.input_tokens, load.shared_tokens) * load.num_requests
    attention += attention_operations(checkpoint, load.shared_tokens)
    prefill_s = 2 * (parameters - head) * prompt_tokens / rate + attention / machine.bfloat16_flops_per_s
    return load.output_tokens * load.num_requests / (steps * max(read_s, multiply_s) + prefill_s)


def prefill_bound_tokens_per_s(
    machine: Machine, checkpoint: str, precision: Precision, num_tokens: int
) -> float:
    """Prompt tokens per second at the machine's rates of multiplication, for prompts of so many tokens."""
    head = int(SHAPES[checkpoint]["vocab_size"] * SHAPES[checkpoint]["hidden_size"])
    products_s = 2 * (matrix_parameters(checkpoint) - head) * num_tokens / precision.flops_per_s(machine)
    attention_s = attention_operations(checkpoint, num_tokens) / machine.bfloat16_flops_per_s
    return num_tokens / (products_s + attention_s)
