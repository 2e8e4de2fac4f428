"""Tests on a CUDA device. Without one they are skipped, or rehearsed: GPU_REHEARSAL=1 runs the same code on
the CPU, kernels under Triton's interpreter, so that nothing but the device is new where there is one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

REHEARSES = os.environ.get("GPU_REHEARSAL") == "1"
if REHEARSES:
    # Chosen when a kernel is defined.
    os.environ["TRITON_INTERPRET"] = "1"
    from engine.kernels.interpreter import round_as_hardware_does

    round_as_hardware_does()

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs a GPU, or a rehearsal."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not REHEARSES and not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu") if REHEARSES else torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def half() -> torch.dtype:
    """The type of activations; the interpreter multiplies no bfloat16."""
    return torch.float16 if REHEARSES else torch.bfloat16
