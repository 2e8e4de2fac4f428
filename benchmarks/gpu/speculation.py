"""Drafts that prompt lookup proposes: what a step that verifies them costs beside a plain one, and whether
the tokens are the same. Greedy decoding of random weights repeats itself soon, so that drafts are found.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.gpu.captured import first_difference
from benchmarks.gpu.device import Gpu
from benchmarks.gpu.in_process import opened
from benchmarks.gpu.report import Report
from benchmarks.in_process import InProcessEngine
from engine.speculation_config import SpeculationConfig
from kernels.config import KernelsConfig

NUM_LAYERS = 8
NUM_DRAFTS = 4


def run(gpu: Gpu, report: Report) -> None:
    """One sequence and several, plain and with drafts."""
    measured: dict[str, dict[int, dict[str, Any]]] = {}
    for method in ("off", "ngram"):
        drafts = SpeculationConfig(method=method, num_draft_tokens=NUM_DRAFTS, min_acceptance=0.0)
        options: dict[str, Any] = {"speculation": drafts}
        if not gpu.rehearses:
            options["kernels"] = KernelsConfig(linear="invariant")
        limits = {"max_num_seqs": gpu.pick(16, 4), "max_model_len": gpu.pick(2048, 120)}
        with opened(gpu, kind="bf16", num_layers=NUM_LAYERS, is_small=True, **limits, **options) as engine:
            measured[method] = {batch: _decoded(gpu, engine, batch) for batch in gpu.pick([1, 16], [2])}
    for batch, plain in measured["off"].items():
        with_drafts = measured["ngram"][batch]
        row = {
            "what": "speculation",
            "batch": batch,
            "layers": NUM_LAYERS,
            "drafts": NUM_DRAFTS,
            "ms_a_step": with_drafts["ms"],
            "plain_ms_a_step": plain["ms"],
            "tokens_a_step": with_drafts["tokens_a_step"],
            "times_plain": with_drafts["tokens_per_s"] / plain["tokens_per_s"],
            "checked": True,
        }
        unequal = first_difference(with_drafts["outputs"], plain["outputs"])
        if unequal:
            report.wrong(unequal, **row)
        else:
            report.row(**row)


def _decoded(gpu: Gpu, engine: InProcessEngine, batch: int) -> dict[str, Any]:
    outputs: dict[int, list[int]] = {}
    ended: list[int] = []

    def listen(event: Any) -> None:
        outputs.setdefault(event.request_id, []).extend(event.token_ids)
        if event.finish_reason is not None:
            ended.append(event.request_id)

    engine.mailbox.listener = listen
    pattern = tuple(range(5, 25))
    for place in range(batch):
        prompt = tuple(token + place for token in pattern) * 3
        engine.submit(0, 10 if gpu.compiles else gpu.pick(200, 12), prompt=prompt)
    engine.run_until(lambda: len(outputs) == batch)
    before, began, steps = sum(map(len, outputs.values())), time.perf_counter(), 0
    while len(ended) < batch:
        engine.loop.step()
        steps += 1
        if steps > 10_000:
            raise RuntimeError("no progress")
    gpu.synchronize()
    seconds = time.perf_counter() - began
    tokens = sum(map(len, outputs.values())) - before
    return {
        "outputs": outputs,
        "ms": seconds / max(1, steps) * 1e3,
        "tokens_a_step": tokens / max(1, steps) / batch,
        "tokens_per_s": tokens / seconds,
    }
