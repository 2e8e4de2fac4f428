"""Tests that need vLLM's environment, or a Redis, are left out where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.vllm_core import environment
from runtime.errors import ConfigError
from tests.e2e.stack import VLLM_PYTHON
from tests.redis_server import RedisServer


@pytest.fixture(scope="session")
def vllm() -> None:
    """E2E_VLLM_PYTHON names its interpreter; else it is what `millrace engine install vllm` made."""
    try:
        environment.check({"engine": {"make": "vllm", "vllm": {"python": VLLM_PYTHON}}})
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of this test's own, in which limits are counted."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()
