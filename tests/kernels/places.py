"""Where Triton's kernels run in these tests: under its interpreter on the CPU, or on a GPU, over more."""

from __future__ import annotations

import os

import pytest
import torch

# conftest.py of a folder has chosen it before any kernel is defined.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def needs_float8() -> None:
    """Skips a test on a GPU whose products take no float8."""
    if not INTERPRETED and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 products need compute capability 8.9")
