"""Models of real shapes with random weights, through the engine's loop: decode against the memory's rate,
prefill against the matrix units', and what of a decode step the GPU waits for Python.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

from benchmarks.gpu.device import Gpu, Roofs
from benchmarks.gpu.in_process import opened
from benchmarks.gpu.random_model import shape_of, weight_elements
from benchmarks.gpu.report import Report
from benchmarks.in_process import DRAWS, InProcessEngine

BYTES = {"fp8": 1.0, "int4": 0.625}
"""Of a layer's weight by kind, with its scale and minimum (four bytes each for 64 inputs); two in others."""
HEAD_BYTES = {"fp8": 1.0, "int4": 1.0}
# Between kernels that follow each other in a graph, or that were launched ahead, lie a few microseconds that
# no host causes: only what is longer can be Python's.
LAUNCH_GAP_US = 5.0


def run(gpu: Gpu, report: Report, *, kind: str) -> None:
    """Decode at several batch sizes, greedily and sampled, then a prompt of 8k tokens."""
    roofs = gpu.roofs()
    batches = gpu.pick([1, 16, 128], [1, 3])
    if kind in ("int4", "moe", "mla"):
        batches = gpu.pick([1, 16], [2])
    with opened(gpu, kind=kind, max_num_seqs=gpu.pick(128, 4), max_model_len=gpu.pick(9000, 100)) as engine:
        report.row(what="engine", kind=kind, attention=engine.facts.attention_backend, **roofs.fields())
        for batch in batches:
            for sampling in DRAWS if kind in ("bf16", "fp8") else ("greedy",):
                _guarded(report, _decode, gpu, report, roofs, engine, kind, batch, sampling)
        _guarded(report, _prefill, gpu, report, roofs, engine, kind, gpu.pick(8192, 60))


def _guarded(report: Report, measure: Any, *given: Any) -> None:
    """One row that cannot be measured does not end the others."""
    try:
        measure(*given)
    except Exception as error:
        report.failed(error, what=measure.__name__.strip("_"))
        # A device that is lost answers nothing any more.
        if "CUDA error" in str(error) or "broke" in str(error):
            raise


def step_bytes(gpu: Gpu, engine: InProcessEngine, kind: str, batch: int, context: int) -> float:
    """Bytes that a decode step cannot help reading: weights once, the histories once."""
    layers, head = weight_elements(shape_of(gpu, kind), batch)
    weights = layers * BYTES.get(kind, 2.0) + head * HEAD_BYTES.get(kind, 2.0)
    return float(weights + batch * context * engine.memory.kv_bytes_per_token)


def _decode(
    gpu: Gpu, report: Report, roofs: Roofs, engine: InProcessEngine, kind: str, batch: int, sampling: str
) -> None:
    """Decode steps, from token to token."""
    context = gpu.pick(1000, 20)
    num_steps = 5 if gpu.compiles else gpu.pick(100, 5)
    tokens: dict[int, int] = {}

    def count(event: Any) -> None:
        tokens[event.request_id] = tokens.get(event.request_id, 0) + len(event.token_ids)

    engine.mailbox.listener = count
    requests = [engine.submit(context, 4 * num_steps, sampling) for _ in range(batch)]
    engine.run_until(lambda: len(tokens) == batch)
    for _ in range(gpu.pick(10, 1)):
        engine.loop.step()
    done_before = sum(tokens.values())
    stamps = [time.perf_counter()]
    for _ in range(num_steps):
        engine.loop.step()
        stamps.append(time.perf_counter())
    gaps = [after - before for before, after in itertools.pairwise(stamps)]
    mean = (stamps[-1] - stamps[0]) / num_steps
    per_step = (sum(tokens.values()) - done_before) / num_steps
    moved = step_bytes(gpu, engine, kind, batch, context + min(tokens.values()) - num_steps // 2)
    share, detail = _waits_for_python(gpu, engine)
    engine.cancel_all(requests)
    report.row(
        what="decode",
        kind=kind,
        batch=batch,
        sampling=sampling,
        context=context,
        ms=mean * 1e3,
        median_ms=statistics.median(gaps) * 1e3,
        p99_ms=sorted(gaps)[int(0.99 * len(gaps))] * 1e3,
        tokens_per_s=per_step / mean,
        bytes=moved,
        of_bandwidth=moved / mean / roofs.bytes_per_s,
        gpu_waits=share,
        **detail,
    )


def _waits_for_python(gpu: Gpu, engine: InProcessEngine) -> tuple[float, dict[str, float | str]]:
    """Part of a stretch of decode steps in which the device had nothing to do, by the profiler's times; what
    all pauses are of it, and the kernels that took most. 1 when the profiler saw nothing.
    """
    num_steps = gpu.pick(20, 2)
    if gpu.rehearses or gpu.compiles:
        for _ in range(num_steps):
            engine.loop.step()
        return 0.0, {}
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(num_steps):
                engine.loop.step()
            torch.cuda.synchronize()
        events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    except Exception as error:
        return 1.0, {"profiler failed": f"{type(error).__name__}: {str(error)[:200]}"}
    spans = [(event.name, event.time_range.start, event.time_range.end) for event in events]
    return waiting_share(spans, num_steps)


def waiting_share(
    spans: list[tuple[str, float, float]], num_steps: int
) -> tuple[float, dict[str, float | str]]:
    """Spans (name, start and end in microseconds), which may overlap: the part of the time from first start
    to last end that lies in pauses longer than LAUNCH_GAP_US, then that in all pauses ("gpu_idle"), and the
    time a step of the names that took most. 1 without spans.
    """
    if not spans:
        return 1.0, {}
    ordered = sorted((start, end) for _, start, end in spans)
    first = last = ordered[0][0]
    pauses = []
    for start, end in ordered:
        pauses.append(max(0.0, start - last))
        last = max(last, end)
    totals: dict[str, float] = {}
    for name, start, end in spans:
        key = f"us a step in {name[:60]}"
        totals[key] = totals.get(key, 0.0) + (end - start) / num_steps
    most = sorted(totals.items(), key=lambda item: -item[1])[:10]
    waited = sum(pause for pause in pauses if pause > LAUNCH_GAP_US)
    return waited / (last - first), {"gpu_idle": sum(pauses) / (last - first), **dict(most)}


def _prefill(gpu: Gpu, report: Report, roofs: Roofs, engine: InProcessEngine, kind: str, length: int) -> None:
    """Time of a step that computes a whole prompt."""
    config = shape_of(gpu, kind)
    times = []
    for _ in range(2 if gpu.compiles else gpu.pick(4, 2)):
        done: list[int] = []
        engine.mailbox.listener = lambda event, done=done: done.append(event.request_id)
        gpu.synchronize()
        began = time.perf_counter()
        engine.submit(length, 1)
        engine.run_until(lambda done=done: bool(done))
        times.append(time.perf_counter() - began)
    # The first compiles for this number of rows.
    seconds = statistics.median(times[1:])
    row = {"what": "prefill", "kind": kind, "tokens": length, "ms": seconds * 1e3}
    if kind not in ("moe", "mla"):
        layers, _ = weight_elements(config, length)
        heads = config["num_attention_heads"] * config["head_dim"]
        attention = config["num_hidden_layers"] * 4 * heads * length * (length + 1) / 2
        flops = 2.0 * layers * length + attention
        row |= {"flops": flops, "of_matrix_rate": flops / seconds / roofs.bf16_flops_per_s}
    report.row(**row, tokens_per_s=length / seconds)
