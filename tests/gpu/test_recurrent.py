"""Triton kernels of layers with a state on the device: the tests that its interpreter runs."""

from __future__ import annotations

from tests.kernels.triton.test_recurrent import *  # noqa: F403
