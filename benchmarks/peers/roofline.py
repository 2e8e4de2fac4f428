"""What the machine's memory and matrix units allow: the lower bound of a run's time.

A decode step reads all weights and the KV of every running sequence; prompts cost two operations per
parameter and token. Both rates are measured in this run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.peers.checkpoints import SHAPES, kv_values_per_token, matrix_parameters
from benchmarks.peers.loads import Load

REPEATS = 7


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Measured rates."""

    read_bytes_per_s: float
    gemm_flops_per_s: float


def measure_machine(num_bytes: int = 1 << 30) -> Machine:
    """Reads a large buffer with all cores, and multiplies large bfloat16 matrices; the best of a few runs."""
    buffer = torch.ones(num_bytes // 8, dtype=torch.float64)
    left = torch.randn(2048, 2048, dtype=torch.bfloat16)
    right = torch.randn(2048, 4096, dtype=torch.bfloat16)
    read_s = min(_seconds(buffer.sum) for _ in range(REPEATS))
    gemm_s = median(_seconds(lambda: left @ right) for _ in range(REPEATS))
    return Machine(read_bytes_per_s=num_bytes / read_s, gemm_flops_per_s=2 * 2048 * 2048 * 4096 / gemm_s)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def bound_tokens_per_s(
    machine: Machine, checkpoint: str, load: Load, *, weight_bytes: float = 2.0, kv_bytes: float = 2.0
) -> float:
    """Output tokens per second that no server can pass whose weights and KV have these bytes per value."""
    parameters = matrix_parameters(checkpoint)
    head = int(SHAPES[checkpoint]["vocab_size"] * SHAPES[checkpoint]["hidden_size"])
    context = load.shared_tokens + load.input_tokens + load.output_tokens / 2
    # A prefix that all share is read once per step.
    own = context - load.shared_tokens
    kv = kv_values_per_token(checkpoint) * kv_bytes * (load.shared_tokens + own * load.concurrency)
    steps = load.output_tokens * load.num_requests / load.concurrency
    decode_s = steps * (parameters * weight_bytes + kv) / machine.read_bytes_per_s
    prompt_tokens = load.input_tokens * load.num_requests + load.shared_tokens
    prefill_s = 2 * (parameters - head) * prompt_tokens / machine.gemm_flops_per_s
    return load.output_tokens * load.num_requests / (decode_s + prefill_s)
