"""What a machine with a GPU serves through sockets, rehearsed: the whole stack over a model whose weights
every process draws, and load from processes of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.report import read_rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif("WHOLE_REHEARSAL" not in os.environ, reason="make test-rehearsal")
@pytest.mark.timeout(300)
def test_drawn_weights_are_served_through_sockets(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.lease", "serve", "--rehearse", "--only", "served_fp8"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'contract/stubs'}"}
    done = subprocess.run(
        [*command, "--limit-s", "250", "--out", str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    served = [row for row in read_rows(tmp_path) if "of_published" in row]
    assert [(row["sampling"], row["failed_requests"]) for row in served] == [("greedy", 0), ("sampled", 0)]
    assert all(row["requests"] > 0 for row in served)
