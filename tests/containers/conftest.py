"""Tests that start docker-compose.yml and k8s/ with a real container engine: `make test-containers`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.engine import Compose, make_certificates

# They take minutes and a Docker engine, and are run when asked for alone.
collect_ignore_glob = [] if os.environ.get("TEST_CONTAINERS") == "1" else ["test_*.py"]


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def plain() -> Iterator[Compose]:
    """The stack as docker-compose.yml has it; tests leave it whole."""
    with Compose() as stack:
        stack.up()
        yield stack
