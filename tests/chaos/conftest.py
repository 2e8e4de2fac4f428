"""Tests that need vLLM's environment are left out where there is none."""

from __future__ import annotations

import pytest

from engine.vllm_core import environment
from services.errors import ConfigError
from tests.e2e.stack import VLLM_PYTHON


@pytest.fixture(scope="session")
def vllm() -> None:
    """E2E_VLLM_PYTHON names its interpreter; else it is what `millrace engine install vllm` made."""
    try:
        environment.check({"engine": {"make": "vllm", "vllm": {"python": VLLM_PYTHON}}})
    except ConfigError as error:
        pytest.skip(str(error))
