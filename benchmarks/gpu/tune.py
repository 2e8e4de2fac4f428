"""Finds the fastest launch shapes of the attention kernel on this device and writes them as the engine reads
them: OUT/attention-tuned.json, to be reviewed and copied to kernels/attention/tuned.json.

A shape counts when its results agree with the standing shape's; one that the device refuses (registers,
shared memory) is passed over. Only shapes that are faster by more than the timings' spread replace it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.device import BLOCK_SIZE, Gpu, Work
from benchmarks.gpu.kernels import DTYPES, filled_cache, ragged
from benchmarks.gpu.report import Report
from kernels.attention.launch_shape import launch_shape
from kernels.attention.ragged import AttentionOptions, RaggedBatch
from kernels.attention.triton_attention import TritonAttention
from kernels.attention.tuning import Shape, arch_of, forced, key_of
from kernels.paged_cache.store import LayerCache

TITLE = "Launch shapes of the attention kernel"
# Query heads, kv heads, head dim: Llama-3.1-8B and Qwen3, Llama-3.1-70B, gpt-oss and the like, Gemma.
MODELS = [(32, 8, 128), (64, 8, 128), (64, 8, 64), (16, 8, 256)]
PREFILL: list[Shape] = [
    (128, 32, 8, 3),
    (128, 64, 8, 2),
    (128, 64, 8, 3),
    (128, 64, 8, 5),
    (128, 128, 8, 2),
    (128, 64, 4, 2),
    (64, 32, 4, 3),
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (64, 128, 4, 2),
    (64, 64, 8, 3),
]
DECODE: list[Shape] = [
    (64, 32, 2, 4),
    (64, 32, 4, 3),
    (64, 64, 2, 3),
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    # From five stages on, two steps of keys and values are on their way: one more is spent on block tables.
    (64, 32, 4, 5),
    (64, 64, 4, 5),
    (64, 128, 4, 2),
    (64, 128, 4, 3),
    (64, 128, 8, 3),
]
# A shape must be faster by this to replace the standing one.
GAIN = 1.02


def run(gpu: Gpu, report: Report) -> None:
    """Every phase, cache and model, the first model first, as far as the time reaches."""
    arch = arch_of(gpu.device) or "rehearsed"
    table: dict[str, dict[str, Shape]] = {arch: {}}
    for heads in gpu.pick(MODELS, [(4, 2, 16)]):
        for kind in gpu.pick(list(DTYPES), ["bf16", "int8"]):
            for final in (True, False):
                if gpu.left_s < 15:
                    report.row(cut_off=f"before {heads}, {kind}, {'prefill' if final else 'decode'}")
                    return
                _tune(gpu, report, table[arch], heads, kind, final=final)
                content = json.dumps(table, indent=1) + "\n"
                (report.folder / "attention-tuned.json").write_text(content, encoding="utf-8")


def _tune(
    gpu: Gpu,
    report: Report,
    entries: dict[str, Shape],
    heads: tuple[int, int, int],
    kind: str,
    *,
    final: bool,
) -> None:
    num_heads, num_kv_heads, dim = heads
    kv = "plain" if kind == "bf16" else kind
    key = key_of(final=final, key_dim=dim, group=num_heads // num_kv_heads, kv=kv)
    works = _workloads(gpu, heads, gpu.dtype if kind == "bf16" else DTYPES[kind], final=final)
    standing = launch_shape(
        group=num_heads // num_kv_heads, key_dim=dim, final=final, kv=kv, arch=arch_of(gpu.device)
    )
    expected = [make()() for make in works]
    base = [gpu.time(make(), graph=not final).seconds for make in works]
    best, best_ratio = None, GAIN
    for shape in gpu.pick(PREFILL if final else DECODE, [(32, 32, 4, 2)]):
        try:
            with forced(key, shape):
                # Made under the shape, as plans depend on it.
                error = max(_error(make()(), wanted) for make, wanted in zip(works, expected, strict=True))
                times = [gpu.time(make(), graph=not final).seconds for make in works]
        except Exception as failure:
            print(f"    {key} {shape}: {type(failure).__name__}: {str(failure)[:100]}", flush=True)
            continue
        ratio = math.prod(old / new for old, new in zip(base, times, strict=True)) ** (1 / len(times))
        sound = error < 2e-2
        report.row(
            what=key, shape=str(shape), times_standing=ratio, relative_error=error, us=sum(times) * 1e6
        )
        if sound and ratio > best_ratio:
            best, best_ratio = shape, ratio
    report.row(what=key, standing=str(standing), best=str(best or "the standing one"), times=best_ratio)
    if best is not None:
        entries[key] = best


def _workloads(
    gpu: Gpu, heads: tuple[int, int, int], dtype: torch.dtype, *, final: bool
) -> list[Callable[[], Work]]:
    """Functions that plan a step and return its attention."""
    sizes = gpu.pick([(1, 8192, 8192), (4, 2048, 2048)], [(1, 70, 70)])
    if not final:
        sizes = gpu.pick([(128, 1024, 1), (16, 8192, 1)], [(2, 70, 1)])
    made = []
    for batch, length, new in sizes:
        cache, tables = filled_cache(gpu, batch, length, dtype, heads=heads)
        q = torch.randn(batch * new, heads[0], heads[2], device=gpu.device).to(gpu.dtype)
        step = ragged([length] * batch, [new] * batch, tables, BLOCK_SIZE)
        made.append(_planner(heads, step, q, cache))
    return made


def _planner(
    heads: tuple[int, int, int], step: RaggedBatch, q: Tensor, cache: LayerCache
) -> Callable[[], Work]:
    options = AttentionOptions(scale=q.shape[2] ** -0.5)

    def make() -> Work:
        backend = TritonAttention(num_heads=heads[0], num_kv_heads=heads[1])
        plan = backend.plan(step, q.device)
        backend.run(plan, q, cache, options)
        assert not backend.smaller, "the device has no room for the shape"
        return lambda: backend.run(plan, q, cache, options)

    return make


def _error(found: Any, expected: Any) -> float:
    difference = (found.float() - expected.float()).norm() / expected.float().norm()
    return float(difference) if bool(difference.isfinite()) else float("inf")
