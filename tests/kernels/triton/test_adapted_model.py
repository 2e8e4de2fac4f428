"""Whole models with adapters through Triton's interpreter: eager, and captured as on a GPU."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import AdaptersConfig
from engine.runner.runner import ModelRunner
from kernels.config import KernelsConfig
from tests.kernels.triton.test_decoder import PRODUCTS, TORCH
from tests.kernels.triton.test_device_runner import PlainRecorder, captured_runner
from tests.unit.engine.adapters.test_merged import load
from tests.unit.engine.adapters.written import write_adapter
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.runner.cuda.test_device_runner import OverlappedDriver
from tests.unit.engine.runner.driver import Driver, Job, open_runner, prompt_of

VOCAB = 199
SLOTS = (0, -1, 1, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model and two adapters."""
    root = tmp_path_factory.mktemp("adapted")
    model = make_checkpoint(root / "base", "llama", num_hidden_layers=1)
    write_adapter(root / "a", model, r=5)
    write_adapter(root / "b", model, r=16, targets=("q_proj", "down_proj"), seed=1)
    return root


def open_adapted(folder: Path, **options: object) -> ModelRunner:
    paths = {name: str(folder / name) for name in "ab"}
    runner = open_runner(
        folder / "base",
        native="off",
        attention_backend="torch",
        kv_cache_bytes=4 << 20,
        max_model_len=96,
        adapters=AdaptersConfig(paths=paths),
        **options,
    )
    load(runner, *paths)
    return runner


def jobs() -> list[Job]:
    return [
        Job(prompt_of(4 + 9 * index, VOCAB, seed=index), 4, adapter_slot=slot)
        for index, slot in enumerate(SLOTS)
    ]


def outputs(folder: Path, kernels: KernelsConfig) -> list[list[int]]:
    with closing(open_adapted(folder, kernels=kernels)) as runner:
        return [job.output for job in Driver(runner).run(jobs())]


def test_products_in_triton_give_the_tokens_of_torch(folder: Path) -> None:
    assert outputs(folder, PRODUCTS) == outputs(folder, TORCH)


def test_captured_steps_take_each_row_s_adapter_from_the_device(folder: Path) -> None:
    recorder = PlainRecorder()
    runner = captured_runner(open_adapted(folder, kernels=PRODUCTS), recorder, rows=(2, 4))
    asked = [replace(job, output=[]) for job in jobs()]
    OverlappedDriver(runner).drive(asked, 3, most=4)
    assert recorder.num_replays > 0
    runner.close()
    assert [job.output for job in asked] == outputs(folder, TORCH)
