"""Every other Triton kernel on the device: the tests that its interpreter runs, over larger shapes."""

from __future__ import annotations

from tests.kernels.triton.test_kernels import *  # noqa: F403
