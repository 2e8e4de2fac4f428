"""What compiling tells those who wait for it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kernels.native import build


def test_compiling_is_a_stage_of_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(build.BuildError):
        build._compile("false", "avx2", tmp_path / "kernels.so")
    stages = [getattr(record, "stage", "") for record in caplog.records]
    assert stages == ["compiling native kernels for avx2, once"]
