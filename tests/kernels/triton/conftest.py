"""Triton's interpreter runs the kernels on the CPU. It is chosen when a kernel is defined, so before any
import.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

from benchmarks.gpu.interpreter import add_in_one_order, prepare_the_language_once, round_as_hardware_does

round_as_hardware_does()
add_in_one_order()
prepare_the_language_once()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels compute in tests that a GPU runs as well (tests/gpu)."""
    return torch.device("cpu")
