"""What tests of the engine share: loaders that start at once."""

from __future__ import annotations

import pytest

from engine.model import loader
from tests.unit.engine.forked import forking_subprocess


@pytest.fixture
def forked_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that load models for the test are forked from one that has imported what they need."""
    monkeypatch.setattr(loader, "subprocess", forking_subprocess())
