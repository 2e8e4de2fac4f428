"""The environment that some of these tests need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime.errors import ConfigError
from services.quantize import environment

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
