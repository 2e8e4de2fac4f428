"""What tests of several models share."""

from __future__ import annotations

import pytest


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that is ready with a model missing, at once."""
    monkeypatch.setattr("gateway.app._ALL_MODELS_S", 0.2)
