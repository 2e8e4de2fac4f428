"""A stack of its own for one benchmark: started, waited for, looked into, stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from services.bench.report import machine
from services.supervisor.process import die_with_parent
from services.supervisor.state import RunState, read_state

START_LIMIT_S = 120.0
_POLL_S = 0.05


class RunningStack:
    """`millrace up` in its own process and state directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def state(self) -> RunState:
        """What runs now: pids change when processes are started again."""
        state = read_state(self._folder)
        if state is None:
            raise SystemExit("the stack has ended; its output:\n" + (self._folder / "output").read_text())
        return state

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"http://{self.state.address}"

    @property
    def ledger_url(self) -> str:
        """SQLAlchemy URL of the stack's ledger."""
        return f"sqlite:///{self._folder / 'ledger.sqlite'}"

    def pids(self) -> dict[str, int]:
        """Process id by name."""
        return {each.name: each.pid for each in self.state.processes}

    def addresses(self, kind: str, purpose: str) -> list[str]:
        """Addresses of all processes of one kind, for example ("engine", "grpc")."""
        return [each.addresses[purpose] for each in self.state.processes if each.name.startswith(kind)]

    def counter(self, kind: str, name: str, label: str = "") -> float:
        """Sum of a metric over the processes of one kind, and over its series that carry `label`."""
        total = 0.0
        for address in self.addresses(kind, "metrics"):
            exposed = httpx.get(f"http://{address}/metrics", trust_env=False).text
            for line in exposed.splitlines():
                if line.startswith((f"{name} ", f"{name}{{")) and label in line:
                    total += float(line.rsplit(" ", 1)[1])
        return total


def python_of(checkout: Path | None) -> str:
    """The interpreter that runs a checkout's stack; this one's where none is given."""
    return sys.executable if checkout is None else str(checkout / ".venv" / "bin" / "python")


@contextmanager
def running_stack(
    config: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    parent: Path | None = None,
    prefix: Sequence[str] = (),
    checkout: Path | None = None,
) -> Iterator[RunningStack]:
    """A healthy stack with this configuration, on free ports; its state is below `parent`, and `prefix`
    stands before its command. Of another checkout with its `.venv`, where one is given.
    """
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        (folder / "millrace.toml").write_text(config)
        command = [*prefix, python_of(checkout), "-m", "services.cli", "up", "--port", "0"]
        command += ["--config", str(folder / "millrace.toml"), *arguments]
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=checkout,
                env={**os.environ, "MILLRACE_STATE_DIR": name, **(environment or {})},
                stdout=output,
                stderr=output,
                # A benchmark that is killed leaves no stack behind.
                preexec_fn=die_with_parent(signal.SIGTERM),  # noqa: PLW1509
            )
        try:
            ends_s = time.monotonic() + START_LIMIT_S
            while read_state(folder) is None:
                if process.poll() is not None or time.monotonic() > ends_s:
                    raise SystemExit((folder / "output").read_text())
                time.sleep(_POLL_S)
            yield RunningStack(folder)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def write_result(path: Path | None, result: Mapping[str, Any]) -> None:
    """The result as JSON, with the machine it was measured on."""
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), **result}, indent=2) + "\n")
