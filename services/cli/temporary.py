"""A stack that serves a checkpoint while a command needs it, and is stopped afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.errors import ConfigError
from services.cli.target import ServerTarget
from services.supervisor.state import read_state


@contextmanager
def temporary_stack(model: str, *options: str) -> Iterator[ServerTarget]:
    """Serves `model` (as `millrace up --model` takes it, which may have more options) on a free port, with a
    state directory of its own.

    Raises ConfigError with the end of what the start said, if it fails.
    """
    directory = Path(tempfile.mkdtemp(prefix="millrace-gate-"))
    environment = {**os.environ, "MILLRACE_STATE_DIR": str(directory)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "services.cli", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    try:
        started = run("up", "--detach", "--port", "0", "--model", model, *options)
        state = read_state(directory)
        if state is None:
            lines = (started.stderr.strip() or started.stdout.strip()).splitlines()
            raise ConfigError(f"{model}: it cannot be served: {lines[-1] if lines else 'the start failed'}")
        yield ServerTarget(state.address, state.api_key, "", f"{state.scheme}://{state.address}")
    finally:
        if read_state(directory) is not None:
            run("stop")
        shutil.rmtree(directory, ignore_errors=True)
