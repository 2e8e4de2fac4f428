"""A start that the disk does not allow ends in a sentence and not in a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def _up(state: Path, before: str = "true") -> subprocess.CompletedProcess[str]:
    command = f"{before}; exec {sys.executable} -m services.cli up --simulated --port 0"
    return subprocess.run(
        ["bash", "-c", command],
        env={"MILLRACE_STATE_DIR": str(state), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("name", ["run.json", "envoy.yaml", "models.json", "engines", "logs"])
def test_something_else_stands_where_a_file_belongs(name: str, tmp_path: Path) -> None:
    if name == "logs":
        (tmp_path / name).write_text("no directory")
    else:
        (tmp_path / name / "inside").mkdir(parents=True)
    ended = _up(tmp_path)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 2, said
    assert "Traceback" not in said
    assert str(tmp_path / name) in said
    assert "; move it away" in said


def test_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    # The limit on the size of files refuses writes as a full disk does, whoever runs the test.
    ended = _up(tmp_path, before="ulimit -f 8")
    said = ended.stdout + ended.stderr
    assert ended.returncode == 2, said
    assert "Traceback" not in said
    assert f"the state directory {tmp_path} cannot be written" in said
    assert "256 KiB free" in said
