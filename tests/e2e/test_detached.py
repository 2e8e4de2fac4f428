"""A stack that runs without a terminal."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path


def test_a_detached_stack_is_shown_traced_and_stopped(tmp_path: Path) -> None:
    state = tmp_path / "state"
    environment = {**os.environ, "MILLRACE_STATE_DIR": str(state)}

    def millrace(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "services.cli", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    started = millrace("up", "--simulated", "--port", "0", "--served-model-name", "mine", "--detach")
    try:
        assert started.returncode == 0, started.stderr
        assert "Starting mine with 5 processes" in started.stderr
        shown = millrace("status")
        assert "mine is served on" in shown.stdout
        assert "gateway-0" in shown.stdout
        assert millrace("chat", "hello", "--max-tokens", "3").returncode == 0
        # Of this request, and whole, though the last spans come seconds later.
        assert "engine.prefill" in millrace("trace", "last").stdout
        assert all(not stat.S_IMODE(each.stat().st_mode) & 0o077 for each in (state, *state.rglob("*")))
    finally:
        stopped = millrace("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert millrace("status").returncode == 2
