"""Tests on a CUDA device. Without one they are not collected, or rehearsed: GPU_REHEARSAL=1 runs the same
code on the CPU, kernels under Triton's interpreter, so that nothing but the device is new where there is one.
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
    from benchmarks.gpu.interpreter import add_in_one_order, prepare_the_language_once, round_as_hardware_does

    round_as_hardware_does()
    add_in_one_order()
    prepare_the_language_once()

HERE = Path(__file__).resolve().parent
WANTED = REHEARSES or torch.cuda.is_available()
# Kernels are defined by being imported, for the interpreter or for a device. Where neither is wanted, tests
# of other folders, which want the interpreter, come to the definitions first.
collect_ignore_glob = [] if WANTED else ["*test_*.py", "runner"]


# Every case is interpreted in tests/kernels/triton as well.
REHEARSED_EVERY = 6


def pytest_configure(config: pytest.Config) -> None:
    """A rehearsal takes some cases of every function."""
    if REHEARSES:
        config.option.every = max(config.option.every, REHEARSED_EVERY)


def pytest_report_header() -> list[str]:
    """Says why nothing may be collected."""
    return [] if WANTED else ["tests/gpu: no CUDA device, nothing is collected; GPU_REHEARSAL=1 rehearses"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs a GPU, or a rehearsal."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu") if REHEARSES else torch.device("cuda", torch.cuda.current_device())
