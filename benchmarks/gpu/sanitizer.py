"""A tiny model under compute-sanitizer's memory checker: no kernel reads or writes beyond what it was given.

Every tensor has an allocation of its own there, so that torch's allocator hides nothing that lies beside it;
captured steps need that allocator, and are left out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from benchmarks.gpu.device import BLOCK_SIZE, Gpu
from benchmarks.gpu.in_process import opened
from benchmarks.gpu.random_model import TINY
from benchmarks.gpu.report import Report
from benchmarks.in_process import DRAWS
from engine.config import CacheConfig, GraphsConfig, SchedulerConfig

TOOL = "compute-sanitizer"
# The exit code that the tool is told to give.
FOUND = 86
KINDS = ("bf16", "fp8", "int4")


def run(gpu: Gpu, report: Report) -> None:
    """Each kind of weights, in a process under the tool."""
    tool = shutil.which(TOOL)
    if tool is None and not gpu.rehearses:
        report.row(what=TOOL, not_measured="it is not installed here")
        return
    for kind in KINDS[: gpu.pick(3, 1)]:
        row = {"what": "memory checked", "kind": kind}
        if gpu.left_s < 10:
            report.row(**row, not_measured="no time was left")
            continue
        prefix = [] if gpu.rehearses or tool is None else [tool, "--tool", "memcheck"]
        if prefix:
            prefix += ["--error-exitcode", str(FOUND), "--target-processes", "application-only"]
        command = [*prefix, sys.executable, "-m", "benchmarks.gpu.sanitizer", kind]
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=max(5.0, gpu.left_s - 3),
                check=False,
            )
        except subprocess.TimeoutExpired:
            report.row(**row, not_measured="it ran out of time")
            continue
        said = "; ".join((done.stdout + done.stderr).strip().splitlines()[-12:])[:1500]
        if done.returncode == FOUND:
            report.wrong(said, **row)
        elif done.returncode:
            report.failed(RuntimeError(said), **row)
        else:
            report.row(**row, checked=True)


def tiny(kind: str) -> None:
    """A few steps of a tiny model, prompts and decode rows in one step and alone."""
    gpu = Gpu(rehearses=os.environ.get("TRITON_INTERPRET") == "1")
    with opened(
        gpu,
        kind=kind,
        max_num_seqs=4,
        max_model_len=100,
        shape=TINY,
        graphs=GraphsConfig(decode="off"),
        # Every step is slow under the tool, those that measure memory included.
        scheduler=SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4, refuse_early=False),
        cache=CacheConfig(
            block_size=BLOCK_SIZE,
            kv_cache_bytes=4 << 20,
            kv_dtype="fp8" if kind == "fp8" else "auto",
            prefix_caching=False,
        ),
    ) as engine:
        ended: list[int] = []
        engine.mailbox.listener = lambda event: (
            ended.append(event.request_id) if event.finish_reason is not None else None
        )
        for place, sampling in enumerate(2 * list(DRAWS)):
            engine.submit(7 + 9 * place, 5 + place, sampling)
        engine.run_until(lambda: len(ended) == 4, limit_s=600)


if __name__ == "__main__":
    tiny(sys.argv[1])
