"""The environment that some of these tests need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.config import VllmConfig
from engine.vllm_core.environment import find_python
from runtime.errors import ConfigError
from services.quantize import environment
from tests.e2e.stack import VLLM_PYTHON

# Read when this file is collected: settings of the shell do not reach tests.
HOME = os.environ.get("E2E_QUANTIZE_HOME", "")


@pytest.fixture
def quantizer(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its interpreter. E2E_QUANTIZE_HOME names its environment; else it is what the command made."""
    folder = Path(HOME) if HOME else environment.quantizer_home()
    try:
        python = environment.quantizer_python(folder)
    except ConfigError as error:
        pytest.skip(str(error))
    if python is None:
        pytest.skip(
            f"{folder}: no llm-compressor there; `python -m services.quantize.environment` installs it"
        )
    monkeypatch.setenv("MILLRACE_QUANTIZE_HOME", str(folder))
    return python


@pytest.fixture
def vllm() -> Path:
    """The interpreter that has vLLM: E2E_VLLM_PYTHON, else the one that its command made."""
    try:
        return find_python(VllmConfig(python=VLLM_PYTHON))
    except ConfigError as error:
        pytest.skip(str(error))
