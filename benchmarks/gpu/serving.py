"""1,000 tokens in, 1,000 out, a closed loop of 256 requests through the engine's loop, as a ratio to what
TensorRT-LLM publishes for this shape on an H200 in FP8 (Llama-3.1-8B, 1,000/1,000: 17,744 output tokens/s).
"""

from __future__ import annotations

import random
import time
from typing import Any

from benchmarks.gpu.device import Gpu
from benchmarks.gpu.in_process import opened
from benchmarks.gpu.report import Report
from benchmarks.in_process import DRAWS, InProcessEngine

TITLE = "Serving 1,000 in / 1,000 out, closed loop of 256"
PUBLISHED_TOKENS_PER_S = 17_744.0


def run(gpu: Gpu, report: Report, *, kind: str) -> None:
    """Until the phase's time is up. "fp8" (weights and KV) is what the published figure has."""
    until = time.monotonic() + gpu.left_s - 15
    with opened(gpu, kind=kind, max_num_seqs=gpu.pick(256, 4), max_model_len=gpu.pick(2100, 100)) as engine:
        for place, draw in enumerate(DRAWS):
            left = until - time.monotonic()
            _serve(gpu, report, engine, kind, draw, time.monotonic() + left / (len(DRAWS) - place))


def _serve(gpu: Gpu, report: Report, engine: InProcessEngine, kind: str, draw: str, until: float) -> None:
    concurrency, num_in, num_out = gpu.pick((256, 1000, 1000), (3, 20, 6))
    chance = random.Random(1)
    first_at: dict[int, float] = {}
    submitted: dict[int, float] = {}
    counted = {"tokens": 0, "requests": 0}
    ttfts: list[float] = []

    def listen(event: Any) -> None:
        counted["tokens"] += len(event.token_ids)
        now = time.perf_counter()
        if event.token_ids and event.request_id not in first_at:
            first_at[event.request_id] = now
            ttfts.append(now - submitted[event.request_id])
        if event.finish_reason is not None:
            counted["requests"] += 1
            del submitted[event.request_id]
            submitted[engine.submit(num_in, num_out, draw)] = now

    engine.mailbox.listener = listen
    for _ in range(concurrency):
        # The first generation ends evenly over time, so that the load is steady at once.
        submitted[engine.submit(num_in, chance.randrange(1, num_out + 1), draw)] = time.perf_counter()
    while len(first_at) < concurrency:
        engine.loop.step()
    for _ in range(gpu.pick(100, 2)):
        engine.loop.step()
    counted["tokens"] = counted["requests"] = 0
    ttfts.clear()
    engine.mailbox.totals.clear()
    began, steps = time.perf_counter(), 0
    # A few generations at most; a part that is cut off would lose what it counted.
    until = min(until, time.monotonic() + 45)
    while time.monotonic() < until and steps < gpu.pick(100_000, 30):
        engine.loop.step()
        steps += 1
    gpu.synchronize()
    seconds = time.perf_counter() - began
    rate = counted["tokens"] / seconds
    engine.mailbox.listener = lambda event: None
    computing = sum(total.seconds for total in engine.mailbox.totals)
    report.row(
        what="served in this process",
        kind=kind,
        sampling=draw,
        concurrency=concurrency,
        seconds=seconds,
        steps=steps,
        finished=counted["requests"],
        output_tokens_per_s=rate,
        of_published=rate / PUBLISHED_TOKENS_PER_S,
        ttft_p50_ms=1e3 * sorted(ttfts)[len(ttfts) // 2] if ttfts else -1.0,
        steps_take=computing / seconds,
    )
    engine.cancel_all(list(submitted))
