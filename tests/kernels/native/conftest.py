"""The native library, at every level that the machine has and that can be tested on it."""

from __future__ import annotations

import pytest

from kernels.native.build import EMULATED, machine_levels
from kernels.native.library import NativeLibrary, NativeUnavailableError, load_level

LEVELS = machine_levels()
PRODUCT_LEVELS = [*LEVELS, *(name for name, (level, _) in EMULATED.items() if level in LEVELS)] or ["none"]


@pytest.fixture(scope="session", params=LEVELS or ["none"])
def native(request: pytest.FixtureRequest) -> NativeLibrary:
    """Each level's library; skipped where it cannot be built."""
    try:
        return load_level(request.param)
    except (NativeUnavailableError, KeyError) as error:
        pytest.skip(f"no native library: {error}")


@pytest.fixture(scope="session", params=PRODUCT_LEVELS)
def product_level(request: pytest.FixtureRequest) -> NativeLibrary:
    """As `native`, and what few processors have in plain instructions besides."""
    try:
        return load_level(request.param)
    except (NativeUnavailableError, KeyError) as error:
        pytest.skip(f"no native library: {error}")
