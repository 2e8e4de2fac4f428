"""A minute that says whether the rest is worth starting: each thing that only a GPU does, once, and whether
it came out right. A line is printed as soon as it is known, and one that fails costs the others nothing.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.device import BLOCK_SIZE, Gpu
from benchmarks.gpu.kernels import DTYPES, filled_cache, ragged
from benchmarks.gpu.report import Report
from engine.runner.block_transfers import HostArena
from engine.runner.cuda.recorder import CudaGraphRecorder
from kernels.attention.ragged import AttentionOptions, DecodeBatch
from kernels.attention.reference import ReferenceAttention
from kernels.attention.triton_attention import TritonAttention
from kernels.linear.formats import Fp8Weight, Int8Weight, WeightFormat
from kernels.linear.triton_backend import MOST_TRITON_ROWS, InvariantLinear, ScaledMmProduct, TritonLinear
from kernels.norm.reference import rms_norm as reference_norm
from kernels.norm.triton_norm import rms_norm

TITLE = "Smoke"
Check = Callable[[Gpu], str]


def run(gpu: Gpu, report: Report) -> None:
    """Everything once."""
    for check in CHECKS:
        began = time.monotonic()
        name = check.__name__.strip("_").replace("_", " ")
        try:
            said = check(gpu)
        except Exception as error:
            report.wrong(f"{type(error).__name__}: {str(error)[:400]}", what=name)
            continue
        report.row(what=name, said=said, seconds=time.monotonic() - began, checked=True)


def _close(found: torch.Tensor, expected: torch.Tensor, limit: float) -> str:
    difference = found.float().cpu() - expected.float().cpu()
    error = float(difference.norm() / expected.float().norm())
    # NaN is not below anything.
    if not error < limit:
        raise ValueError(f"relative error {error:.3g}, and at most {limit} was expected")
    return f"relative error {error:.2g}"


def _segments_grow(gpu: Gpu) -> str:
    """In a process of its own, as the engine asks for them: after torch is there, before it allocates."""
    if gpu.rehearses:
        return "not asked on a CPU"
    code = (
        "import torch; torch.cuda.is_available()\n"
        "from kernels.config import prefer_expandable_segments\n"
        "prefer_expandable_segments()\n"
        "kept = torch.zeros(1 << 24, device='cuda')\n"
        "print(torch.cuda.memory_snapshot()[0]['is_expandable'])\n"
    )
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return f"expandable: {done.stdout.strip()}"


def _host_memory_is_pinned(gpu: Gpu) -> str:
    arena = HostArena(4, 1 << 20, pinned=not gpu.rehearses)
    try:
        there = torch.full((1 << 20,), 7, dtype=torch.uint8, device=gpu.device)
        arena.rows[2].copy_(there, non_blocking=True)
        gpu.synchronize()
        if not bool((arena.rows[2] == 7).all()):
            raise ValueError("the copy did not arrive")
        return f"pinned: {arena.pinned}"
    finally:
        arena.close()


def _norm(gpu: Gpu) -> str:
    x = torch.randn(5, gpu.pick(4096, 100), device=gpu.device).to(gpu.dtype)
    weight = torch.rand(x.shape[1], device=gpu.device)
    return _close(rms_norm(x, weight, 1e-5).out, reference_norm(x.cpu(), weight.cpu(), 1e-5), 1e-2)


def _attention(gpu: Gpu) -> str:
    """Decode rows and a chunk of a prompt, over every kind of cache, in blocks that are copied whole and in
    smaller ones.
    """
    heads = gpu.pick((32, 8, 128), (4, 2, 16))
    lengths, new = gpu.pick(([700, 300, 33], [1, 200, 1]), ([70, 30, 33], [1, 20, 1]))
    said = []
    for (kind, dtype), size in itertools.product(DTYPES.items(), (16, BLOCK_SIZE)):
        stored = gpu.dtype if kind == "bf16" else dtype
        cache, tables = filled_cache(gpu, 3, max(lengths), stored, heads=heads, block_size=size)
        batch = ragged(lengths, new, tables, size)
        q = torch.randn(sum(new), heads[0], heads[2], device=gpu.device).to(gpu.dtype)
        options = AttentionOptions(scale=heads[2] ** -0.5)
        found, expected = (
            kind_of.run(kind_of.plan(batch, gpu.device), q, cache, options)
            for kind_of in (
                back_end(num_heads=heads[0], num_kv_heads=heads[1])
                for back_end in (TritonAttention, ReferenceAttention)
            )
        )
        said.append(f"{kind} by {size} {_close(found, expected, 2e-2)}")
    return ", ".join(said)


def _a_captured_step(gpu: Gpu) -> str:
    """Attention and a norm in a graph, replayed over other contents."""
    heads, rows = gpu.pick((32, 8, 128), (4, 2, 16)), 4
    longest = gpu.pick(1024, 64)
    cache, tables = filled_cache(gpu, rows, longest, gpu.dtype, heads=heads)
    attention = TritonAttention(num_heads=heads[0], num_kv_heads=heads[1])
    batch = DecodeBatch(
        context_lens=torch.ones(rows, dtype=torch.int32, device=gpu.device),
        block_tables=torch.from_numpy(tables).int().to(gpu.device),
        block_size=BLOCK_SIZE,
        max_context_len=longest,
    )
    plan, options = attention.plan_decode(batch), AttentionOptions(scale=heads[2] ** -0.5)
    q = torch.zeros(rows, heads[0], heads[2], dtype=gpu.dtype, device=gpu.device)
    out = torch.zeros_like(q)
    weight = torch.ones(heads[2], device=gpu.device)

    def work() -> None:
        attention.begin(plan)
        mixed = attention.run(plan, q, cache, options)
        out.copy_(rms_norm(mixed, weight, 1e-5).out)

    replay: Callable[[], None] = work
    if not gpu.rehearses:
        replay = CudaGraphRecorder(gpu.device).record(work).replay
    lengths = [longest, longest // 2, 17, 1]
    batch.context_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
    q.normal_()
    replay()
    gpu.synchronize()
    eager = attention.run(
        attention.plan(ragged(lengths, [1] * rows, tables, BLOCK_SIZE), gpu.device), q, cache, options
    )
    expected = rms_norm(eager, weight, 1e-5).out
    same = "the bits of an eager step" if torch.equal(out, expected) else "not the bits of an eager step"
    return f"{same}, {_close(out, expected, 1e-2)}"


def _products(gpu: Gpu) -> str:
    """Every format, by the product that the engine would choose."""
    outputs, inputs = gpu.pick((512, 1024), (32, 64))
    dense = torch.randn(outputs, inputs, device=gpu.device) * inputs**-0.5
    scale = dense.abs().amax(1)
    fp8 = Fp8Weight(values=(dense / (scale / 448)[:, None]).to(torch.float8_e4m3fn), scale=scale / 448)
    int8 = (dense / (scale / 127)[:, None]).round().to(torch.int8)
    weights: dict[str, WeightFormat | torch.Tensor] = {
        "dense": dense.to(gpu.dtype),
        "fp8": fp8,
        "int8": Int8Weight(values=int8, scale=scale[:, None] / 127),
        "w8a8": Int8Weight(values=int8, scale=scale[:, None] / 127, activations="int8"),
    }
    said = []
    for rows in gpu.pick((1, 17, 300), (3,)):
        x = torch.randn(rows, inputs, device=gpu.device).to(gpu.dtype)
        for backend in (TritonLinear(), InvariantLinear()):
            for weight in weights.values():
                product = backend.pack(weight)
                _close(product(x), x.float() @ dense.T, 5e-2)
                if isinstance(product, ScaledMmProduct) and rows > MOST_TRITON_ROWS:
                    said.append("fp8 by torch._scaled_mm")
    return ", ".join(said) or "fp8 by Triton"


CHECKS: tuple[Check, ...] = (
    _segments_grow,
    _host_memory_is_pinned,
    _norm,
    _attention,
    _a_captured_step,
    _products,
)
