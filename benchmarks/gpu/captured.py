"""Captured decode steps give the tokens of eager ones, while requests come and go, and while the allocator's
memory is taken, filled and given back around them: what a graph reads must be its own.

Products do not depend on the batch here (`linear = "invariant"`), so tokens must be equal to the last one.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from benchmarks.gpu.device import Gpu
from benchmarks.gpu.in_process import opened
from benchmarks.gpu.report import Report
from benchmarks.in_process import InProcessEngine
from engine.config import GraphsConfig
from kernels.config import KernelsConfig

# Of the 8B shape's 32: widths are what kernels depend on.
NUM_LAYERS = 4
Outputs = dict[int, list[int]]


def run(gpu: Gpu, report: Report) -> None:
    """The same arrivals through both, and through captured steps once more with a churning allocator."""
    expected = _outputs(gpu, "off", churns=False)
    for churns in (False, True):
        found = _outputs(gpu, "auto", churns=churns)
        row = {
            "what": "captured = eager" + (", allocator churned" if churns else ""),
            "steps": _num_steps(gpu),
            "requests": len(expected),
            "tokens": sum(map(len, expected.values())),
            "checked": True,
        }
        unequal = first_difference(found, expected)
        if unequal:
            report.wrong(unequal, **row)
        else:
            report.row(**row)


def first_difference(found: Outputs, expected: Outputs) -> str:
    """Which request differs first, and where; empty when none does."""
    for request in sorted(expected):
        tokens, wanted = found.get(request, []), expected[request]
        if tokens != wanted:
            pairs = zip(tokens, wanted, strict=False)
            place = next((at for at, (one, other) in enumerate(pairs) if one != other), len(tokens))
            return f"request {request} differs from token {place} of {len(wanted)} on"
    return ""


def _num_steps(gpu: Gpu) -> int:
    return 20 if gpu.compiles else int(gpu.pick(200, 20))


def _outputs(gpu: Gpu, decode: str, *, churns: bool) -> Outputs:
    """Tokens by request, of a load that is the same each time."""
    options: dict[str, Any] = {"graphs": GraphsConfig(decode=decode)}
    if not gpu.rehearses:
        options["kernels"] = KernelsConfig(linear="invariant")
    limits = {"max_num_seqs": gpu.pick(32, 4), "max_model_len": gpu.pick(4096, 100)}
    with opened(gpu, kind="bf16", num_layers=NUM_LAYERS, is_small=True, **limits, **options) as engine:
        if not gpu.rehearses and engine.captures != (decode == "auto"):
            raise RuntimeError(f"graphs.decode is {decode}, and captured steps: {engine.captures}")
        return _load(gpu, engine, churns=churns)


def _load(gpu: Gpu, engine: InProcessEngine, *, churns: bool) -> Outputs:
    chance, elsewhere = random.Random(7), random.Random(8)
    outputs, ended = Outputs(), set[int]()

    def listen(event: Any) -> None:
        outputs.setdefault(event.request_id, []).extend(event.token_ids)
        if event.finish_reason is not None:
            ended.add(event.request_id)

    engine.mailbox.listener = listen
    num_requests = 0
    for step in range(_num_steps(gpu)):
        # More arrive than leave at first; about a third is there at a time.
        if step % 3 == 0:
            length = chance.randrange(1, gpu.pick(900, 30))
            engine.submit(length, chance.randrange(1, gpu.pick(60, 8)), ("greedy", "sampled")[step % 2])
            num_requests += 1
        if churns and step % 5 == 0:
            _churn(gpu, elsewhere)
        engine.loop.step()
    engine.run_until(lambda: len(ended) == num_requests)
    return outputs


def _churn(gpu: Gpu, chance: random.Random) -> None:
    """Takes what is free in pieces of many sizes, fills it with NaN, and gives it back."""
    kept = []
    for _ in range(gpu.pick(20, 2)):
        size = 1 << chance.randrange(10, gpu.pick(28, 14))
        kept.append(torch.full((size,), float("nan"), device=gpu.device))
    del kept[::2]
    kept.clear()
    if not gpu.rehearses:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
