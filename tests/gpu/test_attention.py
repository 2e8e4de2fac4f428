"""Attention in Triton on the device: the tests that its interpreter runs, over shapes of real models."""

from __future__ import annotations

from tests.kernels.triton.test_attention import *  # noqa: F403
