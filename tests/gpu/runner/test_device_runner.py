"""The runner of GPUs on the device: captured steps give the tokens of eager ones, without waiting."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import GraphsConfig, SchedulerConfig
from engine.runner.cuda.decode_graphs import DecodeGraphs
from engine.runner.executors.device import DeviceExecutor
from engine.runner.runner import ModelRunner
from engine.types import SamplingParams
from kernels.config import KernelsConfig
from tests.gpu.conftest import REHEARSES
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.model.test_families import CASES
from tests.unit.engine.runner.cuda.test_device_runner import OverlappedDriver, job_of, open_device_runner
from tests.unit.engine.runner.driver import Driver, Job, open_runner, prompt_of

FAMILIES = ["llama", "qwen3", "gemma2", "gemma3", "olmo2", "phi3", "mixtral", "gpt-oss", "deepseek-v2"]
TORCH = KernelsConfig(norm="torch", rope="torch", activation="torch", linear="torch", sampling="torch")
NUM_SEQS = 24


def opened(folder: Path, **options: Any) -> ModelRunner:
    """A runner on the device; a rehearsal has captured steps held to the rules of graphs on the CPU."""
    if REHEARSES:
        graphs = options.get("graphs", GraphsConfig())
        return open_device_runner(folder, graphs=graphs.decode, max_num_seqs=NUM_SEQS)
    scheduler = SchedulerConfig(max_num_seqs=NUM_SEQS)
    runner = open_runner(folder, device="cuda", scheduler=scheduler, **options)
    assert isinstance(runner.executor, DeviceExecutor)
    return runner


def outputs(runner: ModelRunner, jobs: list[Job]) -> list[list[int]]:
    with closing(runner):
        OverlappedDriver(runner, seed=1).drive(jobs, 1, most=NUM_SEQS - 4)
        return [job.output for job in jobs]


# Experts of every format, latent attention included.
QUANTIZED = [("mixtral", "int4"), ("mixtral", "fp8"), ("deepseek-v2", "int8"), ("deepseek-v2", "w8a8")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "quantize"),
    [("llama", "off")] if REHEARSES else [*((name, "off") for name in FAMILIES), *QUANTIZED],
)
def test_captured_steps_draw_the_tokens_of_eager_ones(name: str, quantize: str, tmp_path: Path) -> None:
    model_type, changes = CASES[name]
    make_checkpoint(tmp_path, model_type, **changes)
    # A captured step has rows that pad it, and a library would choose another kernel for their number.
    options = {"kernels": KernelsConfig(linear="invariant"), "quantize": quantize}
    runner = opened(tmp_path, **options)
    assert isinstance(runner.executor.graphs, DecodeGraphs)
    captured = outputs(runner, [job_of(number) for number in range(30)])
    eager = opened(tmp_path, graphs=GraphsConfig(decode="off"), **options)
    assert eager.executor.graphs is None
    assert captured == outputs(eager, [job_of(number) for number in range(30)])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FAMILIES[:1] if REHEARSES else FAMILIES)
def test_triton_draws_the_tokens_of_torch(name: str, tmp_path: Path) -> None:
    """In float32, the back ends of the device against torch's on the same device, eager and one by one."""
    model_type, changes = CASES[name]
    make_checkpoint(tmp_path, model_type, **changes)
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=3, repetition_penalty=1.1)
    found = []
    for options in (
        {},
        {"kernels": TORCH, "attention_backend": "torch", "graphs": GraphsConfig(decode="off")},
    ):
        runner = opened(tmp_path, **options)
        jobs = [Job(prompt_of(length, 199, seed=length), 8, sampling, chunk=9) for length in (40, 3, 17)]
        found.append([job.output for job in Driver(runner).run(jobs)])
        runner.close()
    assert found[0] == found[1]


@pytest.mark.skipif(REHEARSES, reason="the CPU has no queue")
def test_a_decode_step_waits_for_nothing(tmp_path: Path) -> None:
    """A launch that synchronizes raises; only reading the tokens may."""
    make_checkpoint(tmp_path, "llama")
    runner = opened(tmp_path)
    launch = runner.launch

    def watched(plan: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runner.launch = watched  # type: ignore[method-assign]
    jobs = [Job(prompt_of(9 + number, 199, seed=number), 10) for number in range(5)]
    Driver(runner).run(jobs)
    assert all(len(job.output) == 10 for job in jobs)
    runner.close()
