"""What every test shares: marks by folder, and an environment without settings of the developer's shell."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
# Folders whose tests drive a running stack.
_E2E = (TESTS / "e2e", TESTS / "chaos")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks by place, so that no test of the running stack is forgotten."""
    for item in items:
        if any(folder in item.path.parents for folder in _E2E):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(autouse=True, scope="session")
def _clean_environment() -> None:
    """Settings of the shell that starts pytest must not reach the code under test."""
    for name in [name for name in os.environ if name.startswith("MILLRACE_")]:
        del os.environ[name]
