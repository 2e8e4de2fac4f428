"""Finds the fastest launch shapes of the attention kernel on this device and writes them as the engine reads
them: OUT/attention-tuned.json, to be reviewed and copied to kernels/attention/tuned.json.

A shape counts when its results agree with the standing shape's; one that the device refuses (registers,
shared memory) is passed over. Only shapes that are faster by more than the timings' spread replace it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.device import BLOCK_SIZE, Gpu, Work
from benchmarks.gpu.kernels import DTYPES, filled_cache, ragged
from benchmarks.gpu.report import Report
from kernels.attention import triton_attention
from kernels.attention.launch_shape import launch_shape
from kernels.attention.ragged import AttentionOptions, DecodeBatch, RaggedBatch
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
    (64, 64, 4, 4),
    # From five stages on, two steps of keys and values are on their way: one more is spent on block tables.
    (64, 32, 4, 5),
    (64, 64, 4, 5),
    (64, 128, 4, 2),
    (64, 128, 4, 3),
    (64, 128, 8, 3),
]
# Sequences, history, new tokens: as measured, and as rehearsed.
PROMPTS = ([(1, 8192, 8192), (4, 2048, 2048)], [(1, 70, 70)])
STEPS = ([(1, 1024, 1), (128, 1024, 1), (16, 8192, 1)], [(2, 70, 1)])
PROGRAMS = (3, 4, 5, 6, 8, 12, 24, 48)
# Per load.
SAMPLED_S = 0.08
LARGEST_ERROR = 2e-2
# A shape must be faster by this to replace the standing one.
GAIN = 1.02


def run(gpu: Gpu, report: Report) -> None:
    """Every phase, cache and model, the first model's decode steps first, as far as the time reaches."""
    if gpu.compiles:
        if not gpu.rehearses:
            _compile()
        return
    gpu.budget_s = gpu.pick(SAMPLED_S, 0.0)
    arch = arch_of(gpu.device) or "rehearsed"
    table: dict[str, dict[str, Shape]] = {arch: {}}
    for heads, final, kind in itertools.product(
        gpu.pick(MODELS, [(4, 2, 16)]), (False, True), gpu.pick(list(DTYPES), ["bf16", "int8"])
    ):
        if gpu.left_s < 15:
            report.row(cut_off=f"before {heads}, {kind}, {'prefill' if final else 'decode'}")
            return
        _Search(gpu, report, heads, kind, final=final).run(table[arch])
        content = json.dumps(table, indent=1) + "\n"
        (report.folder / "attention-tuned.json").write_text(content, encoding="utf-8")


def _compile() -> None:
    """Decode's kernels of the first model, side by side: a search would spend most of its time on them."""
    wanted = [(kind, shape) for kind in DTYPES for shape in DECODE]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile_one, *zip(*wanted, strict=True)))


def _compile_one(kind: str, shape: Shape) -> None:
    gpu = Gpu(rehearses=False, compiles=True)
    search = _Search(gpu, Report(None, "compile"), MODELS[0], kind, final=False, sizes=[(1, 1024, 1)])
    # What a device refuses, the search meets again.
    with contextlib.suppress(Exception):
        search.times(shape)


class _Search:
    """The shapes of one phase, cache and model."""

    def __init__(
        self,
        gpu: Gpu,
        report: Report,
        heads: tuple[int, int, int],
        kind: str,
        *,
        final: bool,
        sizes: list[tuple[int, int, int]] | None = None,
    ) -> None:
        self._gpu, self._report, self._final = gpu, report, final
        kv = "plain" if kind == "bf16" else kind
        self._asked = {"group": heads[0] // heads[1], "key_dim": heads[2], "final": final, "kv": kv}
        self._key = key_of(**self._asked)
        dtype = gpu.dtype if kind == "bf16" else DTYPES[kind]
        self._works = _workloads(gpu, heads, dtype, sizes or gpu.pick(*(PROMPTS if final else STEPS)))
        self._expected = [make()() for make in self._works]

    def run(self, entries: dict[str, Shape]) -> None:
        """The best shape goes to `entries` where it is faster than the standing one."""
        standing = launch_shape(**self._asked, arch=arch_of(self._gpu.device))
        base = self.times(None)[0]
        best, best_ratio = None, GAIN
        for shape in self._gpu.pick(PREFILL if self._final else DECODE, [(32, 32, 4, 2)]):
            try:
                times, error = self.times(shape)
            except Exception as failure:
                print(f"    {self._key} {shape}: {type(failure).__name__}: {str(failure)[:100]}", flush=True)
                continue
            ratio = _ratio(base, times)
            self._report.row(
                what=self._key,
                shape=str(shape),
                times_standing=ratio,
                relative_error=error,
                us=_microseconds(times),
            )
            if error < LARGEST_ERROR and ratio > best_ratio:
                best, best_ratio = shape, ratio
        self._report.row(
            what=self._key, standing=str(standing), best=str(best or "the standing one"), times=best_ratio
        )
        if best is not None:
            entries[self._key] = best
        if not self._final:
            self._try_programs(best)

    def times(self, shape: Shape | None) -> tuple[list[float], float]:
        """Seconds of each load under a shape (None: the standing one), and the largest error."""
        with forced(self._key, shape) if shape is not None else contextlib.nullcontext():
            # Made under the shape, as plans depend on it.
            made = [make() for make in self._works]
            error = max(_error(work(), wanted) for work, wanted in zip(made, self._expected, strict=True))
            return [self._gpu.time(work, graph=not self._final).seconds for work in made], error

    def _try_programs(self, shape: Shape | None) -> None:
        """How many programs share a captured step's list: reported, not kept."""
        standing = triton_attention.PROGRAMS_PER_PROCESSOR
        try:
            for programs in self._gpu.pick(PROGRAMS, PROGRAMS[:1]):
                triton_attention.PROGRAMS_PER_PROCESSOR = programs
                self._report.row(what=self._key, programs=programs, us=_microseconds(self.times(shape)[0]))
        finally:
            triton_attention.PROGRAMS_PER_PROCESSOR = standing


def _ratio(base: list[float], times: list[float]) -> float:
    return math.prod(old / new for old, new in zip(base, times, strict=True)) ** (1 / len(times))


def _microseconds(times: list[float]) -> str:
    return " ".join(f"{seconds * 1e6:.1f}" for seconds in times)


def _workloads(
    gpu: Gpu, heads: tuple[int, int, int], dtype: torch.dtype, sizes: list[tuple[int, int, int]]
) -> list[Callable[[], Work]]:
    """Functions that plan a step and return its attention."""
    made = []
    for batch, length, new in sizes:
        cache, tables = filled_cache(gpu, batch, length, dtype, heads=heads)
        q = torch.randn(batch * new, heads[0], heads[2], device=gpu.device).to(gpu.dtype)
        if new > 1:
            step: RaggedBatch | DecodeBatch = ragged([length] * batch, [new] * batch, tables, BLOCK_SIZE)
        else:
            step = _captured(gpu, tables, batch, length)
        made.append(_planner(heads, step, q, cache))
    return made


def _captured(gpu: Gpu, tables: np.ndarray[Any, np.dtype[np.int64]], batch: int, length: int) -> DecodeBatch:
    """A step as engines capture it, with room for histories that are longer."""
    return DecodeBatch(
        context_lens=torch.full((batch,), length, dtype=torch.int32, device=gpu.device),
        block_tables=torch.from_numpy(tables).int().to(gpu.device),
        block_size=BLOCK_SIZE,
        max_context_len=max(length, gpu.pick(8192, 128)),
    )


def _planner(
    heads: tuple[int, int, int], step: RaggedBatch | DecodeBatch, q: Tensor, cache: LayerCache
) -> Callable[[], Work]:
    options = AttentionOptions(scale=q.shape[2] ** -0.5)

    def make() -> Work:
        backend = TritonAttention(num_heads=heads[0], num_kv_heads=heads[1])
        plan = backend.plan_decode(step) if isinstance(step, DecodeBatch) else backend.plan(step, q.device)
        backend.run(plan, q, cache, options)
        assert not backend.smaller, "the device has no room for the shape"
        return lambda: backend.run(plan, q, cache, options)

    return make


def _error(found: Any, expected: Any) -> float:
    difference = (found.float() - expected.float()).norm() / expected.float().norm()
    return float(difference) if bool(difference.isfinite()) else float("inf")
